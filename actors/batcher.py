"""The batcher: one engine, stepped for as long as there is work, and a message per step per session host.

The engine is not thread-safe and belongs to the stepping task alone: what messages ask of it is put in
order and done between two steps. So an answer to `Generate` or `CancelGeneration` comes within one step, and
a cancel is confirmed when slot and blocks are free.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import trio
from attrs import define, field, frozen

from actors.batcher_figures import Figures
from actors.batcher_gpu import Seat
from actors.batcher_witness import Witnessing
from actors.bell import Bell
from actors.protocol import (
    CancelGeneration,
    ErrorBody,
    Generate,
    GenerationAccepted,
    GenerationCancelled,
    GenerationRefused,
    Load,
    Metrics,
    ReadMetrics,
    TokenChunk,
    TokenLogprob,
    Tokens,
)
from actors.scripted_engine import ScriptedEngine
from actors.turn_errors import INVALID, overloaded
from gpu.blocks import BLOCK_SIZE
from gpu.engine import Engine
from gpu.engine_on_gpu import load_engine_on_gpu
from gpu.errors import BadRequest, EngineFull, GpuFailed, GpuFull
from gpu.sequence import Request, SequenceOutput, StepOutput, StepStats
from store.witness_outbox import Count, WitnessOutbox
from supervision import chaos_hooks
from supervision.actor import LATER, Actor, Later, Sender
from supervision.errors import ActorDown, AskFailed, CannotGoOn

log = logging.getLogger(__name__)

LOAD_EVERY = 0.1
"""Seconds between two reports to the router at least."""
LOAD_ANYWAY = 1.0
"""A router that was restarted hears of an idle batcher within this."""
_BUSY_PAUSE = 0.05
MEMORY_PAUSE = 0.25
"""Seconds before a step that found no memory on the GPU is tried again."""
MEMORY_TRIES = 4
"""Steps without memory, one after the other, at which the newest generation is shed to make do with less."""
POISON_SEED = int.from_bytes(b"POISON")
"""A request with this seed kills the batcher that takes it on, where ANTIPHON_CHAOS=1: its prompt has no words here."""
_CHOSEN = ("max_batch", "max_waiting", "token_budget", "kv_bytes")


class EngineFace(Protocol):
    """What a batcher needs of an engine."""

    context_length: int
    """Tokens a request may have: what the model was made for, or what its KV pool holds where that is less."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def add(self, request: Request) -> None:
        """Take a request. Raises `BadRequest` or `EngineFull`."""

    def cancel(self, request_id: str) -> bool:
        """End a request; its blocks are free when this returns."""

    def step(self) -> StepOutput:
        """Run one iteration. Raises `GpuFull` with nothing done, and `GpuFailed`."""

    def close(self) -> None:
        """Give memory back."""


@frozen
class BatcherSettings:
    """`model` is the file or directory, `name` what the router calls it; 0 and "" mean by default."""

    model: str
    name: str
    engine: Literal["host", "cuda", "scripted"] = "host"
    device: str = ""
    """UUID of the card, for `cuda`; no other is seen by the process."""
    device_name: str = ""
    """What people call that card."""
    threads: int = 0
    """Of the host engine."""
    kv_bytes: int = 0
    max_batch: int = 0
    token_budget: int = 0
    max_waiting: int = 0
    step_seconds: float = 0.0
    """Pace of the scripted engine."""
    outbox: str = ""
    """Path of the witness outbox; "" is `journal/<actor's name>.sqlite` under the state directory."""


@define(eq=False)
class _Generation:
    """One generation in the engine, and who asked for it."""

    ask: Generate
    session: tuple[str, int]
    key: str
    start: int
    end: int


@define(eq=False)
class _Post:
    """What waits to be sent to one session host: several steps are one message while it is slow."""

    session: tuple[str, int]
    chunks: list[TokenChunk] = field(factory=list)
    bell: Bell = field(factory=Bell)
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class Batcher(Actor):
    """Answers `Generate` and `CancelGeneration`; sends `Tokens`, `Load` and `Witness`."""

    Settings: ClassVar[type] = BatcherSettings

    def __init__(self, settings: BatcherSettings) -> None:
        self._settings = settings
        self._engine: EngineFace
        self._witnessing: Witnessing
        self._figures = Figures(settings.name)
        self._orders: deque[tuple[Any, Sender]] = deque()
        self._lost_sessions: list[tuple[str, int]] = []
        self._bell = Bell()
        self._generations: dict[str, _Generation] = {}
        self._posts: dict[tuple[str, int], _Post] = {}
        self._stats = StepStats()
        self._taken = 0
        self._seat = Seat(settings.device, settings.device_name or "the GPU")
        self._steps_without_memory = 0

    @classmethod
    def prepare(cls, settings: BatcherSettings) -> None:
        """Load, and compile where that was never done, the kernels that this model needs on a processor.

        They stay when the engine that asked for them is gone. A GPU is never touched: its driver survives no fork.
        """
        if settings.engine == "host":
            Engine.load(settings.model, threads=1, max_batch=1).close()

    def make_engine(self) -> EngineFace:
        """Return the engine that the settings name. Runs in a thread; a model takes its time to load."""
        settings = self._settings
        chosen = {key: value for key in _CHOSEN if (value := getattr(settings, key))}
        if settings.engine == "scripted":
            sizes = {key: chosen[key] for key in ("max_batch", "max_waiting") if key in chosen}
            return ScriptedEngine(**sizes)
        if settings.engine == "cuda":
            return load_engine_on_gpu(settings.model, **chosen)
        progress = _Progress(settings.name)
        return Engine.load(settings.model, threads=settings.threads or None, progress=progress, **chosen)

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        """Load the model and begin to step."""
        if self._settings.engine == "scripted":
            self._engine = self.make_engine()
        elif self._settings.engine == "cuda":
            others_serve = bool(self.context.tree.up("edge"))
            self._engine = await self._seat.load(self.make_engine, others_serve=others_serve)
        else:
            self._engine = await trio.to_thread.run_sync(self.make_engine)
        if isinstance(self._engine, Engine):
            _state_the_pool(self._settings.name, self._engine)
        context = self.context
        path = self._settings.outbox or context.state_dir / "journal" / f"{context.name}.sqlite"
        self._witnessing = Witnessing(WitnessOutbox(Path(path)), context)
        for task in (self._run, self._witnessing.run, self._report):
            context.nursery.start_soon(task)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Put it in order for the stepping task."""
        match message:
            case Generate() | CancelGeneration():
                return self._order(message, sender)
            case ReadMetrics():
                running = min(len(self._generations), self._stats.batch)
                name = self.context.name
                lines = self._figures.lines(name, running, len(self._generations) - running)
                owed = f'antiphon_witness_events_owed{{actor="{name}"}} {self._witnessing.owed}'
                return Metrics((*lines, owed))
        return None

    def _order(self, message: Generate | CancelGeneration, sender: Sender) -> Later:
        self._orders.append((message, sender))
        self._bell.ring()
        return LATER

    async def on_down(self, name: str, epoch: int) -> None:
        """A session host is gone: its successor asks again for what it wants, from where its journal ends."""
        self._lost_sessions.append((name, epoch))
        self._bell.ring()

    # ------------------------------------------------------------------ the stepping task

    async def _run(self) -> None:
        while True:
            await self._do_orders()
            self.context.busy(self._engine.has_work)
            if not self._engine.has_work:
                await self._bell.wait()
                continue
            try:
                output = await self._step()
            except GpuFull as error:
                await self._wait_for_memory(error)
                continue
            except GpuFailed as error:
                self.context.busy(False)  # no step is late: what follows is asking what became of the card
                raise CannotGoOn(await self._seat.obituary(error)) from error
            self._steps_without_memory = 0
            self.context.progress()
            self._take(output)

    async def _step(self) -> StepOutput:
        if self._settings.engine == "scripted":
            await trio.sleep(self._settings.step_seconds)
            return self._engine.step()
        return await trio.to_thread.run_sync(self._engine.step)

    async def _wait_for_memory(self, error: GpuFull) -> None:
        """Keep what runs and take nothing new for a moment; if that does not help, shed the newest generation."""
        self._steps_without_memory += 1
        log.warning("no memory on the GPU for a step: %s", error)
        if self._steps_without_memory % MEMORY_TRIES == 0 and self._generations:
            newest = next(reversed(self._generations.values()))
            position = newest.end
            self._end(newest)
            post = self._post(newest.session)
            post.chunks.append(TokenChunk(newest.ask.generation, position, (), (), "shed", str(error), 0))
            post.bell.ring()
            self.context.progress()
        await trio.sleep(MEMORY_PAUSE)

    async def _do_orders(self) -> None:
        while self._lost_sessions:
            self._drop_session(self._lost_sessions.pop())
        while self._orders:
            message, sender = self._orders.popleft()
            answer = self._add(message, sender) if isinstance(message, Generate) else self._cancel(message)
            if sender.correlation:
                await self.context.reply(sender, answer)

    def _add(self, ask: Generate, sender: Sender) -> GenerationAccepted | GenerationRefused:
        session = (sender.name, sender.epoch)
        running = self._generations.get(ask.generation)
        if running is not None and running.session == session:
            return GenerationAccepted(ask.generation)
        if running is not None:
            self._end(running)
        if self._steps_without_memory:
            return GenerationRefused(ask.generation, overloaded("The GPU's memory is full."))
        try:
            self._engine.add(
                Request(
                    ask.generation,
                    ask.prompt,
                    ask.params,
                    ask.emitted,
                    ask.owner,
                    ask.cache_key,
                    ask.priority,
                )
            )
        except EngineFull as error:
            return GenerationRefused(ask.generation, overloaded(str(error)))
        except BadRequest as error:
            return GenerationRefused(ask.generation, ErrorBody(400, INVALID, error.text, error.param))
        if ask.params.seed == POISON_SEED:
            chaos_hooks.die()
        self._taken += 1
        key = f"{ask.generation}@{self.context.name}.{self.context.epoch}.{self._taken}"
        start = len(ask.emitted)
        self._generations[ask.generation] = _Generation(ask, session, key, start, start)
        self._figures.arrived(ask.generation, len(ask.prompt))
        return GenerationAccepted(ask.generation)

    def _cancel(self, message: CancelGeneration) -> GenerationCancelled:
        running = self._generations.get(message.generation)
        if running is not None:
            self._end(running)
        return GenerationCancelled(message.generation, running is not None)

    def _end(self, running: _Generation) -> None:
        """Have the engine forget a generation, and the books hear of it."""
        name = running.ask.generation
        self._engine.cancel(name)
        del self._generations[name]
        self._witnessing.finished(_count(running))

    def _drop_session(self, session: tuple[str, int]) -> None:
        for running in [g for g in self._generations.values() if g.session == session]:
            self._end(running)
        post = self._posts.pop(session, None)
        if post is not None:
            post.scope.cancel()

    # ------------------------------------------------------------------ what a step gave

    def _take(self, output: StepOutput) -> None:
        self._stats = output.stats
        self._figures.stepped(output)
        moved: list[tuple[_Generation, SequenceOutput]] = []
        for one in output.outputs:
            running = self._generations.get(one.id)
            if running is not None and one.finish != "cancelled":
                running.end = max(running.end, one.position + len(one.tokens))
                moved.append((running, one))
        self._witnessing.count(_count(running) for running, one in moved if running.ask.charge and one.tokens)
        for running, one in moved:
            self._post(running.session).chunks.append(_chunk(one))
            if one.finish:
                del self._generations[one.id]
                self._witnessing.finished(_count(running))
        for post in self._posts.values():
            if post.chunks:
                post.bell.ring()

    def _post(self, session: tuple[str, int]) -> _Post:
        post = self._posts.get(session)
        if post is None:
            post = self._posts[session] = _Post(session)
            self.context.nursery.start_soon(self._deliver, post)
        return post

    async def _deliver(self, post: _Post) -> None:
        name, epoch = post.session
        with post.scope:
            while True:
                await post.bell.wait()
                while post.chunks:
                    chunks, post.chunks = tuple(post.chunks), []
                    if not await self._tell(name, epoch, Tokens(chunks)):
                        return

    async def _tell(self, name: str, epoch: int, tokens: Tokens) -> bool:
        while True:
            try:
                await self.context.tell(name, tokens, to_epoch=epoch)
            except ActorDown:
                self._lost_sessions.append((name, epoch))
                self._bell.ring()
                return False
            except AskFailed as error:
                log.info("%s takes no tokens: %s", name, error)
                await trio.sleep(_BUSY_PAUSE)
            else:
                return True

    # ------------------------------------------------------------------ load

    async def _report(self) -> None:
        told, told_at = None, 0.0
        while True:
            load = self._load()
            now = trio.current_time()
            if load != told or now - told_at >= LOAD_ANYWAY:
                try:
                    await self.context.tell("router", load)
                    told, told_at = load, now
                except AskFailed:
                    told = None
            await trio.sleep(LOAD_EVERY)

    def _load(self) -> Load:
        stats = self._stats
        here = len(self._generations)
        waiting = min(stats.waiting, here)
        free = stats.blocks_total - stats.blocks_used
        room = self._engine.context_length
        return Load(self._settings.name, here - waiting, waiting, free, stats.blocks_total, room)


def _state_the_pool(model: str, engine: Engine) -> None:
    size = engine.kv_bytes / 2**20
    log.info(
        "%s: the KV pool has %d blocks of %d tokens, %.0f MiB", model, engine.pool.total, BLOCK_SIZE, size
    )
    if engine.context_length < engine.model.config.context_length:
        log.warning(
            "%s: a request has at most %d tokens, for which the pool has room; the model could take %d",
            model,
            engine.context_length,
            engine.model.config.context_length,
        )


@define
class _Progress:
    """Logs a long loading at every tenth of it."""

    model: str
    _tenths: int = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total if total else 10
        if tenths > self._tenths:
            self._tenths = tenths
            log.info("%s: loaded %d %% of %.0f MB", self.model, 10 * tenths, total / 1e6)


def _count(running: _Generation) -> Count:
    ask = running.ask
    request_id, _, choice = ask.generation.rpartition("/")
    return Count(
        running.key,
        request_id,
        int(choice),
        ask.owner,
        ask.model,
        len(ask.prompt),
        running.start,
        running.end,
    )


def _chunk(output: SequenceOutput) -> TokenChunk:
    logprobs = tuple(TokenLogprob(one.token, one.logprob, one.top) for one in output.logprobs)
    finish: Any = output.finish
    return TokenChunk(
        output.id, output.position, output.tokens, logprobs, finish, output.error, output.cached_tokens
    )
