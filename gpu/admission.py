"""What a request must satisfy before the engine takes it.

The edge checks first; the engine trusts no index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpu.errors import BadRequest
from gpu.kernels import MAX_TOP_LOGPROBS
from gpu.scheduler import PRIORITY_LIMIT
from gpu.sequence import Request


def check_request(request: Request, vocab_size: int, context_length: int) -> None:
    """Raise `BadRequest`, naming the field, if running `request` could hurt anybody."""
    params = request.params
    _check_tokens("prompt", request.prompt, vocab_size)
    _check_tokens("emitted", request.emitted, vocab_size)
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_tokens("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    if not request.prompt:
        raise BadRequest("prompt", "is empty; at least one token is needed")
    if params.max_tokens < 1:
        raise BadRequest("max_tokens", f"{params.max_tokens} is not at least 1")
    if len(request.prompt) + params.max_tokens > context_length:
        raise BadRequest(
            "max_tokens",
            f"{len(request.prompt)} prompt tokens and {params.max_tokens} more exceed the context of {context_length}",
        )
    if not -1 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest("logprobs", f"{params.logprobs} is not within -1 to {MAX_TOP_LOGPROBS}")
    if not -PRIORITY_LIMIT <= request.priority <= PRIORITY_LIMIT:
        raise BadRequest("priority", f"{request.priority} is not within ±{PRIORITY_LIMIT}")
    _check_numbers(request)


def _check_tokens(param: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequest(param, f"token {token} is not within the vocabulary of {vocab_size}")


def _check_numbers(request: Request) -> None:
    p = request.params
    lowest = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "presence_penalty": -math.inf}
    for name in (*lowest, "top_p", "frequency_penalty", "repetition_penalty"):
        value = getattr(p, name)
        if not math.isfinite(value) or value < lowest.get(name, -math.inf):
            raise BadRequest(
                name, f"{value} is not a finite number of at least {lowest.get(name, 'any size')}"
            )
    if not all(math.isfinite(value) for _, value in p.logit_bias):
        raise BadRequest("logit_bias", "every bias must be finite")
    if not 0 < p.top_p <= 1:
        raise BadRequest("top_p", f"{p.top_p} is not above 0 and at most 1")
    if p.min_p > 1:
        raise BadRequest("min_p", f"{p.min_p} is above 1")
    if p.repetition_penalty <= 0:
        raise BadRequest("repetition_penalty", f"{p.repetition_penalty} is not above 0")
