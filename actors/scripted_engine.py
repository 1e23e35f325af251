"""An engine without a model: it answers from a script, token by token. For benches, simulations and tests.

It has the real engine's face and its promises (positions, resuming, cancelling, seeds), and `BytesText` is
the tokenizer that goes with it: token ids 0 to 255 are the bytes of UTF-8, 256 ends a reply.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from actors.protocol import ChatMessage
from gpu.errors import BadRequest, EngineFull
from gpu.sequence import Request, SequenceOutput, StepOutput, StepStats, TokenLogprob

EOS = 256
N_VOCAB = 257
BLOCK_SIZE = 16
CONTEXT_LENGTH = 8192
_ASSISTANT = b"<assistant>"

Script = Callable[[Request], bytes]
"""What the model would say to a prompt, all of it."""


class _Characters:
    """Bytes to whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in tokens if token < EOS))

    def finish(self) -> str:
        self._decoder.reset()
        return ""


@frozen
class BytesText:
    """`actors.prompt.ModelText` with a token for each byte."""

    context_length: int = CONTEXT_LENGTH
    n_vocab: int = N_VOCAB

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return `<role>content` for each message, then the mark where the reply begins."""
        try:
            turns = [f"<{m.role}>{m.content}\n".encode() for m in messages]
        except UnicodeEncodeError as error:
            raise BadRequest("messages", "the text is not Unicode: it has a lone surrogate") from error
        return list(b"".join(turns) + _ASSISTANT)

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(text.encode())

    def detokenizer(self) -> _Characters:
        """Return a fresh one, for one reply."""
        return _Characters()

    def token_bytes(self, token: int) -> bytes:
        """Return a token's own byte."""
        return bytes((token,)) if token < EOS else b""


def last_message(prompt: Sequence[int]) -> bytes:
    """Return the content of the prompt's last message."""
    text = bytes(token for token in prompt if token < EOS).removesuffix(b"\n" + _ASSISTANT)
    return text.rpartition(b"<user>")[2]


def echo(request: Request) -> bytes:
    """Say the last message back; with a temperature, letters that depend on the seed and position alone."""
    said = last_message(request.prompt)
    if request.params.temperature <= 0:
        return b"You said: " + said
    seed = request.params.seed.to_bytes(16, "big", signed=True)
    digest = (hashlib.sha256(seed + at.to_bytes(4, "big")).digest()[0] for at in range(len(said)))
    return bytes(ord("a") + value % 26 for value in digest)


@define(eq=False)
class _Running:
    request: Request
    script: bytes
    position: int
    prefilled: bool = field(default=False)


class ScriptedEngine:
    """`gpu.engine.Engine` by script: one token a step for each running request, and a step takes no time.

    Blocks are counted as the real one counts them.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        max_batch: int = 256,
        max_waiting: int = 4096,
        blocks: int = 65536,
    ) -> None:
        self.context_length = CONTEXT_LENGTH
        self.vocab_size = N_VOCAB
        self.blocks_total = blocks
        self._script = script
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._requests: dict[str, _Running] = {}
        self._ended: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._requests or self._ended)

    def add(self, request: Request) -> None:
        """Take a request. Raises `BadRequest` or `EngineFull`; nothing of it is kept then."""
        if request.id in self._requests:
            raise BadRequest("id", f"{request.id!r} is in the engine already")
        if len(self._requests) >= self._max_batch + self._max_waiting:
            raise EngineFull(f"{len(self._requests)} requests are here; ask again later")
        if len(request.prompt) + len(request.emitted) >= self.context_length:
            raise BadRequest("messages", f"the prompt leaves no room in {self.context_length} tokens")
        self._requests[request.id] = _Running(request, self._script(request), len(request.emitted))

    def cancel(self, request_id: str) -> bool:
        """End a request; its blocks are free when this returns. The next step reports it as `cancelled`."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return False
        self._ended.append(_output(running, (), "cancelled"))
        return True

    def step(self) -> StepOutput:
        """Run one iteration: one more token for each running request."""
        outputs, self._ended = self._ended, []
        batch = list(self._requests.values())[: self._max_batch]
        new = [running.request for running in batch if not running.prefilled]
        prefilled = sum(len(request.prompt) for request in new)
        for running in batch:
            running.prefilled = True
            outputs.append(self._advance(running))
        stats = StepStats(
            batch=len(batch),
            prefilled=prefilled,
            decoded=len(batch),
            waiting=max(0, len(self._requests) - self._max_batch),
            blocks_used=sum(map(_blocks, self._requests.values())),
            blocks_total=self.blocks_total,
        )
        return StepOutput(tuple(outputs), stats, tuple(request.id for request in new))

    def close(self) -> None:
        """Nothing is held."""

    def _advance(self, running: _Running) -> SequenceOutput:
        params, position = running.request.params, running.position
        if position >= params.max_tokens:
            return self._end(running, (), "length")
        if position >= len(running.script) and not (params.ignore_eos and running.script):
            return self._end(running, (), "stop")
        token = running.script[position % len(running.script)]
        if token in params.stop_token_ids:
            return self._end(running, (), "stop")
        if position + 1 >= params.max_tokens:
            return self._end(running, (token,), "length")
        running.position += 1
        return _output(running, (token,), "", position)

    def _end(self, running: _Running, tokens: tuple[int, ...], finish: str) -> SequenceOutput:
        del self._requests[running.request.id]
        return _output(running, tokens, finish)


def _output(
    running: _Running, tokens: tuple[int, ...], finish: str, position: int | None = None
) -> SequenceOutput:
    request = running.request
    at = running.position if position is None else position
    wanted = request.params.logprobs
    top = tuple((token, 0.0) for token in tokens) if wanted > 0 else ()
    logprobs = tuple(TokenLogprob(token, 0.0, top) for token in tokens) if wanted >= 0 else ()
    return SequenceOutput(request.id, at, tokens, logprobs, finish, "", len(request.prompt), 0)


def _blocks(running: _Running) -> int:
    return -(-(len(running.request.prompt) + running.position) // BLOCK_SIZE)
