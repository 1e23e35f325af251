"""One choice's tokens: placed at a batcher, watched, and placed again from position n when it is gone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio
from attrs import evolve, frozen

from actors.bell import Bell
from actors.protocol import (
    Allow,
    Generate,
    GenerationAccepted,
    GenerationRefused,
    TokenChunk,
)
from actors.turn_errors import TurnError, internal, unavailable
from actors.turn_host import Host
from actors.turn_journal import encode
from gpu.sampling_params import SamplingParams
from store.journal_records import Chunk
from supervision.errors import ActorDown, AskFailed

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Batchers that may die of one generation, by the rule of `Generation`; then it is refused."""
_PAUSE_FIRST = 0.02
_PAUSE_LAST = 0.1


@frozen
class Job:
    """What a generation needs to be asked for, wherever it runs."""

    request_id: str
    choice: int
    owner: str
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    allow: Allow
    cache_key: str
    priority: int

    @property
    def name(self) -> str:
        """The generation's name at the batcher."""
        return f"{self.request_id}/{self.choice}"


class Generation:
    """Gets every token of one choice, in order, once, from whichever batcher is alive.

    Suspicion: a batcher that dies before it gave this generation a token counts against it. From the first
    such death on it is placed only while it holds the host's quarantine, so that of several only the guilty
    one dies twice; a second death ends it with an error. Deaths after a token count for nothing: then others
    are to blame, or nobody.
    """

    def __init__(
        self,
        host: Host,
        job: Job,
        batcher: str,
        reroute: Callable[[tuple[str, ...]], Awaitable[str]],
    ) -> None:
        self.host = host
        self.job = job
        self.tokens: list[int] = []
        self.finish = ""
        """The engine's word that no token will come: stop, length, error or shed."""
        self.fault = ""
        self.cached_tokens = 0
        self.accepted = False
        """Whether any batcher ever took it on."""
        self._batcher = batcher
        self._reroute = reroute
        self._where: tuple[str, int] | None = None
        self._lost = False
        self._gap = False
        self._progressed = True
        self._deaths = 0
        self._stop = False
        self._bell = Bell()

    # ------------------------------------------------------------------ what comes in

    def offer(self, chunk: TokenChunk, sender: tuple[str, int]) -> Chunk | None:
        """Take what is new in a batcher's chunk; returns the journal's row for it, None when nothing is.

        Chunks of another incarnation than the one it is placed at, and positions that are known, are dropped;
        a chunk from further ahead means that one was lost, and has the generation placed again.
        """
        if sender != self._where or self.finish:
            self.host.counters["stale_tokens"] += 1
            return None
        known = len(self.tokens) - chunk.position
        if known < 0:
            self.host.counters["token_gaps"] += 1
            self._gap = True
            self._bell.ring()
            return None
        tokens, logprobs = chunk.tokens[known:], chunk.logprobs[known:]
        if known > len(chunk.tokens) or not (tokens or chunk.finish):
            self.host.counters["repeated_tokens"] += 1
            return None
        row = Chunk(
            self.job.request_id,
            self.job.choice,
            len(self.tokens),
            tokens,
            encode(logprobs) if logprobs else b"",
            chunk.finish,
            chunk.error,
            chunk.cached_tokens,
        )
        self.recall(row)
        self._progressed = True
        self._bell.ring()
        return row

    def recall(self, row: Chunk) -> None:
        """Take a chunk as known: one that is about to be journalled, or that the journal has."""
        if not self.tokens:
            self.cached_tokens = row.cached_tokens
        self.tokens += row.tokens
        self.finish, self.fault = row.finish, row.error

    def batcher_down(self, name: str, epoch: int) -> None:
        """An incarnation of an actor is gone: perhaps the one that this runs on."""
        if self._where == (name, epoch):
            self._lost = True
            self._bell.ring()

    def is_at(self, batcher: tuple[str, int]) -> bool:
        """Whether tokens from this incarnation are wanted."""
        return self._where == batcher

    def stop(self) -> None:
        """No more tokens are wanted: the batcher is told, in a task of the host."""
        self._stop = True
        self._bell.ring()
        if self._where is not None and not self.finish and not self._lost:
            self.host.cancel_generation(self.job.name, *self._where, self.job.owner)
        self._where = None

    # ------------------------------------------------------------------ the task

    def cut(self) -> Chunk:
        """End it here, with every token it may have; returns the journal's row that says so."""
        self.finish = "length"
        return Chunk(self.job.request_id, self.job.choice, len(self.tokens), (), b"", "length")

    async def run(self) -> bool:
        """Return True when the last chunk is here, or `stop` was called.

        False means that it has every token it may have and the batcher's word of it was lost: `cut` it.
        Raises `TurnError` when no batcher takes it on. Cancellation: whoever cancels calls `stop`.
        """
        while not (self.finish or self._stop):
            if len(self.tokens) >= self.job.params.max_tokens:
                return False
            if self._deaths:
                async with self.host.quarantine:
                    await self._place()
                    await self._watch(until_progress=True)
            else:
                await self._place()
            await self._watch()
        return True

    async def _place(self) -> None:
        """Return when a batcher has accepted it, or has died of being asked."""
        deadline = trio.current_time() + self.host.settings.batcher_patience
        pause = _PAUSE_FIRST
        avoid: tuple[str, ...] = ()
        self._lost = False
        while not self._stop:
            refusal = await self._try_place(avoid)
            if refusal is None or self.finish or self._lost:
                return
            avoid = (self._batcher,)
            if trio.current_time() + pause >= deadline:
                raise refusal
            await self.host.context.pause(pause)
            pause = min(2 * pause, _PAUSE_LAST)

    async def _try_place(self, avoid: tuple[str, ...]) -> TurnError | None:
        """Ask one batcher. Returns why it was not accepted, when another try may succeed."""
        if self.host.context.tree.epoch(self._batcher) == 0 or self._batcher in avoid:
            refusal = await self._choose(avoid)
            if refusal is not None:
                return refusal
        epoch = self.host.context.tree.epoch(self._batcher)
        if epoch == 0:
            return unavailable("No engine is up for this model. Try again later.")
        self._where, self._gap, self._progressed = (self._batcher, epoch), False, False
        try:
            reply = await self.host.context.ask(
                self._batcher,
                self._request(),
                timeout=self.host.settings.generate_timeout,
                to_epoch=epoch,
                owner=self.job.owner,
            )
        except ActorDown as error:
            self._lost = True
            self._suspect()
            return unavailable(f"The engine went away ({error.reason}). Try again later.")
        except AskFailed as error:
            return unavailable(f"The engine did not answer ({error.reason or type(error).__name__}).")
        return self._judge(reply)

    async def _choose(self, avoid: tuple[str, ...]) -> TurnError | None:
        """Have the router name a batcher: another one than it should avoid, or the same when there is no other."""
        for hint in (avoid, ()) if avoid else ((),):
            try:
                self._batcher = await self._reroute(hint)
            except TurnError as error:
                if error.error.status != 503:
                    raise
                refusal = error
            else:
                return None
        return refusal

    def _judge(self, reply: object) -> TurnError | None:
        if isinstance(reply, GenerationAccepted) and reply.generation == self.job.name:
            self.accepted = True
            return None
        if isinstance(reply, GenerationRefused) and reply.error.status != 503:
            raise TurnError(reply.error)
        if isinstance(reply, GenerationRefused):
            return TurnError(reply.error)
        self.host.counters["bad_replies"] += 1
        return internal("The engine answered something else than it was asked.")

    def _request(self) -> Generate:
        job = self.job
        return Generate(
            job.name,
            job.owner,
            job.model,
            job.prompt,
            evolve(job.params, seed=job.params.seed + job.choice),
            job.allow,
            tuple(self.tokens),
            job.cache_key,
            job.priority,
        )

    async def _watch(self, *, until_progress: bool = False) -> None:
        """Return when it is finished, stopped, or must be placed again; or at the first token."""
        while not (self.finish or self._stop):
            if self._lost:
                self.host.counters["batchers_lost"] += 1
                self._suspect()
                return
            if self._gap:
                await self._take_back()
                return
            if until_progress and self._progressed:
                return
            with trio.move_on_after(self.host.settings.silence) as quiet:
                await self._bell.wait()
            if quiet.cancelled_caught:
                self.host.counters["batcher_silences"] += 1
                return

    async def _take_back(self) -> None:
        """A chunk is missing: have the batcher forget the generation, to ask for the rest."""
        where, self._where = self._where, None
        if where is not None:
            await self.host.stop_generation(self.job.name, *where, self.job.owner)

    def _suspect(self) -> None:
        """The batcher died while this was there. Raises `TurnError` when it is to blame."""
        where, self._where = self._where, None
        if where is None or self._progressed:
            return
        self._deaths += 1
        log.warning("%s died of, or beside, %s", where, self.job.name)
        if self._deaths >= MAX_DEATHS:
            self.host.counters["poison_refused"] += 1
            raise internal(
                "The engine failed on this request twice, so it is not tried again.", "engine_failed"
            )
