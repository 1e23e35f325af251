"""What a request may say about how its tokens are chosen."""

from __future__ import annotations

from attrs import frozen


@frozen
class SamplingParams:
    """The parameters of one reply. Ranges are checked at the edge; the engine trusts them.

    Sampling is a function of (logits, seed, position) only: a counter-based generator.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k: also of the k likeliest."""
