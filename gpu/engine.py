"""The engine: schedule, forward, sample. Many requests in, a token for each of them out, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gpu.admission import check_request
from gpu.batch import BatchBuilder
from gpu.blocks import BLOCK_SIZE, BlockPool
from gpu.errors import BadRequest, EngineFull, ModelError, StepTooLarge
from gpu.governor import ChunkGovernor
from gpu.kernels import StepResult
from gpu.kernels.host import HostKernels
from gpu.llama import Llama
from gpu.memory import available_bytes
from gpu.scheduler import Piece, Plan, Scheduler
from gpu.sequence import Request, Sequence, SequenceOutput, StepOutput, StepStats, TokenLogprob
from gpu.weights import open_weights

MAX_BATCH, TOKEN_BUDGET, MAX_WAITING = 32, 256, 1024
KV_SHARE = 0.25
"""Of the memory that is available after loading, when nothing else is said."""


class Engine:
    """One model on one device. Not thread-safe: one owner calls `add`, `cancel` and `step` in turn.

    `context_length` is the model's, or the KV pool's if that is smaller: any request that is taken can
    finish alone.
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

        `kv_bytes` bounds the KV pool (default: a quarter of the memory that is left). `progress` is called
        with
        (bytes loaded, bytes in all).
        """
        card, source = open_weights(path)
        kernels = HostKernels(
            source,
            Path(path),
            max_rows=token_budget,
            max_samples=max_batch,
            context=card.context_length,
            threads=threads,
            progress=progress,
        )
        wanted = max_batch * -(-card.context_length // BLOCK_SIZE)
        blocks = min(wanted, (kv_bytes or int(available_bytes() * KV_SHARE)) // kernels.block_bytes)
        if blocks < 1:
            raise ModelError(
                f"no memory for one KV block of {kernels.block_bytes} bytes; raise kv_bytes or free some memory"
            )
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

        Raises `GpuFull` with everything as it was before, `GpuFailed` when the engine is of no more use.
        """
        began = time.perf_counter()
        self.scheduler.chunk_beside_decode = self._governor.chunk
        plan = self.scheduler.plan()
        self._forget_preempted(plan)
        try:
            result = self.model.step(self._builder.build(plan.pieces)) if plan.pieces else None
        except StepTooLarge as error:
            self._end(max(plan.pieces, key=_list_length).sequence, "error", str(error))
            plan, result = Plan(preempted=plan.preempted), None
        outputs = self._take(plan, result) if result else []
        outputs, self._ended = [*self._ended, *outputs], []
        return StepOutput(tuple(outputs), self._stats(plan, result, time.perf_counter() - began))

    def close(self) -> None:
        """Stop the kernels' threads and give memory back. The engine is of no use afterwards."""
        self.model.kernels.close()

    def _forget_preempted(self, plan: Plan) -> None:
        if plan.preempted:
            for sequence in self.scheduler.waiting:
                self._builder.forget(sequence)

    def _take(self, plan: Plan, result: StepResult) -> list[SequenceOutput]:
        outputs = []
        tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        sample = 0
        for piece in plan.pieces:
            last = piece.is_last
            self.scheduler.computed(piece)
            if last:
                detail = self._logprob(piece.sequence, result, sample, logprobs[sample])
                outputs.append(self._accept(piece, tokens[sample], detail))
                sample += 1
        return outputs

    @staticmethod
    def _logprob(
        sequence: Sequence, result: StepResult, sample: int, logprob: float
    ) -> tuple[TokenLogprob, ...]:
        wanted = sequence.request.params.logprobs
        if wanted < 0:
            return ()
        top = zip(
            result.top_tokens[sample, :wanted].tolist(),
            result.top_logprobs[sample, :wanted].tolist(),
            strict=True,
        )
        return (TokenLogprob(int(result.tokens[sample]), logprob, tuple(top)),)

    def _accept(self, piece: Piece, token: int, detail: tuple[TokenLogprob, ...]) -> SequenceOutput:
        """Append a sampled token, or end the sequence with it."""
        sequence = piece.sequence
        request, position = sequence.request, sequence.position
        params = request.params
        if token < 0:
            error = "the model gave no finite distribution for this request"
            return self._end(sequence, "error", error, report=False)
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            return self._end(sequence, "stop", report=False)
        sequence.tokens.append(token)
        finish = "length" if position + 1 >= params.max_tokens else ""
        if finish:
            self._end(sequence, finish, report=False)
        cached = sequence.cached_tokens or 0
        return SequenceOutput(request.id, position, (token,), detail, finish, "", len(request.prompt), cached)

    def _end(
        self, sequence: Sequence, finish: str, error: str = "", *, report: bool = True
    ) -> SequenceOutput:
        self.scheduler.remove(sequence)
        self._builder.forget(sequence)
        del self._sequences[sequence.request.id]
        output = _ending(sequence.request, sequence.position, sequence.cached_tokens or 0, finish, error)
        if report:
            self._ended.append(output)
        return output

    def _stats(self, plan: Plan, result: StepResult | None, seconds: float) -> StepStats:
        forward = result.forward_seconds if result else 0.0
        sampling = result.sampling_seconds if result else 0.0
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
            preemptions=plan.preempted,
            prefix_queried=plan.queried,
            prefix_hits=plan.hits,
            forward_seconds=forward,
            sampling_seconds=sampling,
            python_seconds=seconds - forward - sampling,
            bytes_moved=result.bytes_moved if result else 0,
        )


def _list_length(piece: Piece) -> int:
    """How much of a step's input a request's biases and penalties are: what may make a step too large."""
    params = piece.sequence.request.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return len(params.logit_bias) + (len(piece.sequence.tokens) if penalised else 0)


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
