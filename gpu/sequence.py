"""A request, the sequence it becomes, and what a step says of it. Imports no array library."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

from attrs import define, field, frozen

from gpu.sampling_params import SamplingParams


@frozen
class Request:
    """One reply to make. `emitted` are tokens of the reply that were given out before: it goes on after them.

    `owner` and `cache_key` salt the prefix cache: requests that differ in either share no block.
    A lower `priority` is served sooner.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    emitted: tuple[int, ...] = ()
    owner: str = ""
    cache_key: str = ""
    priority: int = 0


@frozen
class TokenLogprob:
    """Natural log-probabilities under the model's own distribution, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first; as many as were asked for."""


@frozen
class SequenceOutput:
    """What one step did for one request."""

    id: str
    position: int
    """Of the first of `tokens` in the reply, counting `Request.emitted`."""
    tokens: tuple[int, ...]
    """Never holds the token that ended the reply."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each of `tokens` if they were asked for, else empty."""
    finish: str
    """"" while it goes on; then once: stop, length, error or cancelled."""
    error: str
    prompt_tokens: int
    cached_tokens: int


@frozen
class StepStats:
    """One step in figures. Seconds are wall time; bytes are what the kernels had to read and write."""

    batch: int = 0
    prefilled: int = 0
    decoded: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    prefix_queried: int = 0
    """Prompt tokens looked up in the prefix cache by the sequences admitted in this step."""
    prefix_hits: int = 0
    """How many of those were there."""
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0
    python_seconds: float = 0.0
    """Of the engine's own: what lies between the end of one step on the device and the start of the next."""
    bytes_moved: int = 0


@frozen
class StepOutput:
    """Everything one `Engine.step` brought forth."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats
    admitted: tuple[str, ...] = ()
    """Requests that left the queue with this step."""


def cache_salt(owner: str, cache_key: str) -> bytes:
    """The first link of a prefix chain. Lengths keep ("ab", "c") apart from ("a", "bc")."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (owner, cache_key)]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


@define(eq=False)
class Sequence:
    """A request inside the engine. Invariant: the KV of `tokens[:computed]` lies in `blocks`."""

    request: Request
    arrival: int
    """Counts requests; breaks ties of `deadline`."""
    deadline: int
    """Virtual time by which it wants to run: the scheduler's one sort key."""
    tokens: list[int]
    """Prompt, emitted and made so far."""
    computed: int = 0
    blocks: list[int] = field(factory=list)
    cached_tokens: int | None = None
    """Set at the first admission."""
    registered: int = 0
    """Leading blocks that are in the prefix cache already."""
    _digests: list[bytes] = field(factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return (self.deadline, self.arrival)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 means it decodes."""
        return len(self.tokens) - self.computed

    @property
    def position(self) -> int:
        """Index in the reply of the next token to be made."""
        return len(self.tokens) - len(self.request.prompt)

    def digests(self, block_size: int, count: int) -> Iterator[bytes]:
        """The chain over the first `count` full blocks: each link covers all tokens before it."""
        chain = self._digests
        while len(chain) < count:
            at = len(chain) * block_size
            before = chain[-1] if chain else cache_salt(self.request.owner, self.request.cache_key)
            chain.append(
                hashlib.sha256(before + array("q", self.tokens[at : at + block_size]).tobytes()).digest()
            )
        return iter(chain[:count])
