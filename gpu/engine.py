"""The engine: schedule, forward, sample. Many requests in, a token for each of them out, step by step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from attrs import frozen

from gpu.admission import check_request
from gpu.batch import BatchBuilder
from gpu.blocks import BLOCK_SIZE, BlockPool
from gpu.errors import BadRequest, EngineFull, GpuFailed, GpuFull, ModelError, StepTooLarge
from gpu.governor import ChunkGovernor
from gpu.kernels import Pending, StepResult
from gpu.kernels.host import HostKernels
from gpu.llama import Llama
from gpu.memory import available_bytes
from gpu.scheduler import Piece, Plan, Scheduler
from gpu.sequence import Request, Sequence, SequenceOutput, StepOutput, StepStats, TokenLogprob
from gpu.warm_up import first_step
from gpu.weights import open_weights

MAX_BATCH, TOKEN_BUDGET, MAX_WAITING = 32, 256, 1024
KV_SHARE = 0.25
"""Of the memory that is left after a first step, when nothing else is said."""


@frozen
class _Started:
    """A step that is under way; `pending` is None where there was nothing to run."""

    plan: Plan
    pending: Pending | None
    seconds: float
    """What it took to plan and to start it."""


class _Made(NamedTuple):
    """What became of a sequence in a step that sampled for it."""

    sequence: Sequence
    sample: int
    position: int
    tokens: tuple[int, ...]
    finish: str
    error: str


class Engine:
    """One model on one device. Not thread-safe: one owner calls `add`, `cancel` and `step` in turn.

    `context_length` is the model's, or the KV pool's if that is smaller: any request that is taken can
    finish alone.

    Where the kernels overlap, `step` starts the next step before it returns, so that the device works while the
    caller deals with the tokens. A sequence that is cancelled meanwhile is passed over when that step ends. Until
    then its blocks are written to, which harms nobody: only a plan hands out blocks, and none is made while a step
    is under way.
    """

    def __init__(
        self,
        model: Llama,
        *,
        eos_ids: tuple[int, ...],
        blocks: int,
        max_batch: int = MAX_BATCH,
        token_budget: int = TOKEN_BUDGET,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        config = model.config
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = config.vocab_size
        self.context_length = min(config.context_length, blocks * BLOCK_SIZE)
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, max_batch, token_budget, max_waiting)
        self._builder = BatchBuilder(max_batch, -(-self.context_length // BLOCK_SIZE), eos_ids)
        self._governor = ChunkGovernor(token_budget)
        self._sequences: dict[str, Sequence] = {}
        self._ended: list[SequenceOutput] = []
        self._under_way: _Started | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        kv_bytes: int | None = None,
        max_batch: int = MAX_BATCH,
        token_budget: int = TOKEN_BUDGET,
        max_waiting: int = MAX_WAITING,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Load a GGUF file or a safetensors directory. Raises `ModelError`.

        `kv_bytes` bounds the KV pool (default: a quarter of the memory that is left when the model has run once,
        its weights not counted). `progress` is called with (bytes loaded, bytes in all).
        """
        card, source = open_weights(path)
        make = partial(
            HostKernels,
            source,
            Path(path),
            max_rows=token_budget,
            max_samples=max_batch,
            context=card.context_length,
            threads=threads,
        )
        # A program holds its cache's address, and a thread may be late for it as long as there are threads. So the
        # first step is taken by kernels of its own, which are gone before memory is looked at for good.
        first = make(progress=progress)
        try:
            first.allocate_cache(1)
            Llama(source, first).step(first_step())
            left = available_bytes() - first.weight_bytes  # mapped pages count as available, but must stay
        finally:
            first.close()
        wanted = max_batch * -(-card.context_length // BLOCK_SIZE)
        blocks = min(wanted, (kv_bytes or int(left * KV_SHARE)) // first.block_bytes)
        if blocks < 1:
            raise ModelError(
                f"no memory for one KV block of {first.block_bytes} bytes; raise kv_bytes or free some memory"
            )
        kernels = make()
        kernels.allocate_cache(blocks)
        model = Llama(source, kernels)
        return cls(
            model,
            eos_ids=card.eos_ids,
            blocks=blocks,
            max_batch=max_batch,
            token_budget=token_budget,
            max_waiting=max_waiting,
        )

    @property
    def kv_bytes(self) -> int:
        """Of the whole KV pool: what a start states, in blocks of `BLOCK_SIZE` tokens."""
        return self.pool.total * self.model.kernels.block_bytes

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._sequences or self._ended)

    def add(self, request: Request) -> None:
        """Take a request. Raises `BadRequest` or `EngineFull`; nothing of it is kept then.

        One whose `emitted` reach `max_tokens` already is answered by the next step with `length` and no
        tokens.
        """
        if request.id in self._sequences:
            raise BadRequest("id", f"{request.id!r} is in the engine already")
        check_request(request, self.vocab_size, self.context_length)
        if len(request.emitted) >= request.params.max_tokens:
            self._ended.append(_ending(request, len(request.emitted), 0, "length"))
            return
        self._sequences[request.id] = self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        """End a request in whatever state it is; its blocks are free when this returns.

        The next step reports it once more, as `cancelled`. False: it is not here, or has ended already.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, "cancelled")
        return True

    def step(self) -> StepOutput:
        """Run one iteration: a token for each decoding sequence, a chunk of the prompts beside them.

        What was added since the last call takes part, or where kernels overlap in the iteration after. Raises
        `GpuFull` with everything as it was before, `GpuFailed` when the engine is of no more use.
        """
        step, self._under_way = self._under_way or self._start(), None
        began = time.perf_counter()
        result = None if step.pending is None else self.model.finish(step.pending)
        made = self._advance(step.plan, result) if result else []
        ended, self._ended = self._ended, []
        stats = self._stats(step, result, time.perf_counter() - began)
        self._start_ahead()
        outputs = [_output(one, result) for one in made] if result else []
        admitted = tuple(sequence.request.id for sequence in step.plan.admitted)
        return StepOutput((*ended, *outputs), stats, admitted)

    def close(self) -> None:
        """Stop the kernels' threads and give memory back. The engine is of no use afterwards."""
        step, self._under_way = self._under_way, None
        if step is not None and step.pending is not None:
            with contextlib.suppress(GpuFull, GpuFailed):
                self.model.finish(step.pending)
        self.model.kernels.close()

    def _start(self) -> _Started:
        began = time.perf_counter()
        self.scheduler.chunk_beside_decode = self._governor.chunk
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self._builder.forget(sequence)
        try:
            pending = self.model.start(self._builder.build(plan.pieces)) if plan.pieces else None
        except StepTooLarge as error:
            self._end(max(plan.pieces, key=_list_length).sequence, "error", str(error))
            plan, pending = Plan(preempted=plan.preempted), None
        return _Started(plan, pending, time.perf_counter() - began)

    def _start_ahead(self) -> None:
        if self.model.kernels.overlaps and self._sequences:
            # What fails here fails again in the next call, and is raised there: this one's tokens go out first.
            with contextlib.suppress(GpuFull, GpuFailed):
                self._under_way = self._start()

    def _advance(self, plan: Plan, result: StepResult) -> list[_Made]:
        """Bring every sequence forward that is still here: all that the next plan needs, and no more."""
        made, sample, tokens = [], 0, result.tokens.tolist()
        for piece in plan.pieces:
            sequence, last = piece.sequence, piece.is_last
            if self._sequences.get(sequence.request.id) is sequence:
                self.scheduler.computed(piece)
                if last:
                    made.append(self._accept(sequence, sample, tokens[sample]))
            sample += last
        return made

    def _accept(self, sequence: Sequence, sample: int, token: int) -> _Made:
        """Append a sampled token, or end the sequence with it."""
        params, position = sequence.request.params, sequence.position
        if token < 0:
            self._remove(sequence)
            error = "the model gave no finite distribution for this request"
            return _Made(sequence, sample, position, (), "error", error)
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            self._remove(sequence)
            return _Made(sequence, sample, position, (), "stop", "")
        sequence.tokens.append(token)
        finish = "length" if position + 1 >= params.max_tokens else ""
        if finish:
            self._remove(sequence)
        return _Made(sequence, sample, position, (token,), finish, "")

    def _end(self, sequence: Sequence, finish: str, error: str = "") -> None:
        """End a sequence that no step ended; the next output says so."""
        self._remove(sequence)
        cached = sequence.cached_tokens or 0
        self._ended.append(_ending(sequence.request, sequence.position, cached, finish, error))

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._builder.forget(sequence)
        del self._sequences[sequence.request.id]

    def _stats(self, step: _Started, result: StepResult | None, seconds: float) -> StepStats:
        plan = step.plan
        forward = result.forward_seconds if result else 0.0
        decoded = sum(piece.count == 1 for piece in plan.pieces)
        prefilled = sum(piece.count for piece in plan.pieces) - decoded
        self._governor.note(decoded, prefilled, forward)
        return StepStats(
            batch=len(plan.pieces),
            prefilled=prefilled,
            decoded=decoded,
            waiting=len(self.scheduler.waiting),
            blocks_used=self.pool.in_use,
            blocks_total=self.pool.total,
            preemptions=len(plan.preempted),
            prefix_queried=plan.queried,
            prefix_hits=plan.hits,
            forward_seconds=forward,
            sampling_seconds=result.sampling_seconds if result else 0.0,
            python_seconds=step.seconds + seconds - (result.waited_seconds if result else 0.0),
            bytes_moved=result.bytes_moved if result else 0,
        )


def _list_length(piece: Piece) -> int:
    """How much of a step's input a request's biases and penalties are: what may make a step too large."""
    params = piece.sequence.request.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return len(params.logit_bias) + (len(piece.sequence.tokens) if penalised else 0)


def _output(made: _Made, result: StepResult) -> SequenceOutput:
    sequence, sample, position, tokens, finish, error = made
    request, cached = sequence.request, sequence.cached_tokens or 0
    details = _logprob(result, sample, request.params.logprobs) if tokens else ()
    return SequenceOutput(request.id, position, tokens, details, finish, error, len(request.prompt), cached)


def _logprob(result: StepResult, sample: int, wanted: int) -> tuple[TokenLogprob, ...]:
    if wanted < 0:
        return ()
    tokens, chances = result.top_tokens[sample, :wanted], result.top_logprobs[sample, :wanted]
    top = tuple(zip(tokens.tolist(), chances.tolist(), strict=True))
    return (TokenLogprob(int(result.tokens[sample]), float(result.logprobs[sample]), top),)


def _ending(request: Request, position: int, cached: int, finish: str, error: str = "") -> SequenceOutput:
    return SequenceOutput(request.id, position, (), (), finish, error, len(request.prompt), cached)


__all__ = [
    "BadRequest",
    "Engine",
    "EngineFull",
    "Request",
    "SequenceOutput",
    "StepOutput",
    "StepStats",
    "TokenLogprob",
]
