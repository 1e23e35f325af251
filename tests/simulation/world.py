"""The whole tree in one process: the actors themselves, their stores on disk, and a supervisor that restarts."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import trio
from attrs import define, field

from actors.batcher import Batcher, BatcherSettings
from actors.edge.turns import Patience, Turns
from actors.fast_answer import FastAnswer, FastAnswerSettings
from actors.ledger import Ledger, LedgerSettings, PriceSettings
from actors.limiter import Limiter, LimiterSettings
from actors.prompt import ModelText
from actors.protocol import TurnEvents
from actors.router import Router, RouterSettings
from actors.safety import Safety, SafetySettings
from actors.scripted_engine import BytesText, ScriptedEngine
from actors.session import Session
from actors.turn_host import SessionSettings
from store.journal import Journal, JournalError
from store.limits_state import LimitsState
from store.witness_outbox import OutboxError, WitnessOutbox
from supervision.actor import Actor, Sender
from supervision.envelope import Envelope
from supervision.errors import ActorDown
from supervision.local import LocalTree
from tests.simulation import goldens, state
from tests.simulation.faults import EVERYONE, STORM_SECONDS, Disk, Network, Plan

MODEL = "small"
MOST_MESSAGES = 20_000
"""Some 300 are usual, 2,000 the most: past it two actors go round in circles, and time stands still."""
PRICES = (PriceSettings("*", prompt=3_000_000, cached=1_000_000, completion=7_000_000, fast_answer=5),)


class Edge(Actor):
    """The edge's side of turns, without sockets: the same `Turns` and readers as `actors.edge`."""

    Settings: ClassVar[type] = Patience

    def __init__(self, settings: Patience) -> None:
        self._settings = settings

    async def on_start(self) -> None:
        """Begin without readers."""
        self.turns = Turns(self.context, self._settings, 4096)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Pass events on."""
        if isinstance(message, TurnEvents):
            self.turns.on_events(message)

    async def on_down(self, name: str, epoch: int) -> None:
        """Readers attach again."""
        self.turns.on_down(name)


class _Session(Session):
    async def _load_models(self) -> dict[str, ModelText]:
        return {MODEL: BytesText(2048)}  # every prompt that fits is short


class _Batcher(Batcher):
    def make_engine(self) -> ScriptedEngine:
        return ScriptedEngine(goldens.script, max_batch=self._settings.max_batch, max_waiting=64)


@define(eq=False)
class Incarnation:
    """What the simulation knows of a running actor."""

    name: str
    actor: Actor
    dead: bool = False
    """Killed: it may still run to its next checkpoint, but neither hub nor disk hears of it."""
    stopping: bool = False
    """It drains: it takes nothing new, and its successor is yet to come."""


_CURRENT: ContextVar[Incarnation] = ContextVar("incarnation")


@define
class World:
    """One seed's tree. `violations` is what must stay empty."""

    plan: Plan
    rng: random.Random
    state: Path
    names: tuple[str, ...]
    pace: float
    concurrency: int
    tree: LocalTree
    network: Network = field(init=False)
    disk: Disk = field(init=False)
    violations: list[str] = field(factory=list)
    trace: list[str] | None = None
    counts: Counter[str] = field(factory=Counter)
    screened: dict[tuple[str, int], list[tuple[int, str, int]]] = field(factory=dict)
    """What checkers allowed of each choice: (start, text they read, end they allowed)."""
    actors: dict[str, Incarnation] = field(factory=dict)
    _nursery: trio.Nursery = field(init=False)
    _hash: Any = field(factory=lambda: blake2b(digest_size=8))

    def __attrs_post_init__(self) -> None:
        rng = random.Random(self.rng.random())
        self.network = Network(self.plan, rng, trio.current_time, self.kill, self._heard)
        self.disk = Disk(self.plan)
        self.tree.hub.fault = self.network

    # ------------------------------------------------------------------ what is seen

    @property
    def digest(self) -> str:
        """Names everything that happened, in order: equal for equal runs."""
        return self._hash.hexdigest()

    def note(self, what: str) -> None:
        """Write in the trace, and into the digest."""
        line = f"{trio.current_time():9.4f} {what}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def violation(self, what: str) -> None:
        """A promise was broken."""
        self.note(f"VIOLATION {what}")
        self.violations.append(what)

    def _heard(self, envelope: Envelope, copies: Sequence[float]) -> None:
        self.counts["messages"] += 1
        if self.counts["messages"] == MOST_MESSAGES:
            self.violation(f"A: no end of messages: {envelope.sender}→{envelope.to} {envelope.kind}")
            self._nursery.cancel_scope.cancel()
        fate = "" if copies == [0.0] else f" → {[round(c, 3) for c in copies]}"
        about = f" {envelope.body}" if self.trace is not None else ""
        self.note(
            f"{envelope.sender}→{envelope.to} {envelope.role} {envelope.kind}#{envelope.correlation}{fate}{about}"
        )

    # ------------------------------------------------------------------ supervision

    async def run(self, nursery: trio.Nursery) -> None:
        """Start every actor in the tree's order; they are restarted in `nursery` whenever they die."""
        self._nursery = nursery
        for name in self.names:
            await nursery.start(self._keep, name)

    def calm(self) -> None:
        """The storm is over: from now on nothing goes wrong."""
        self.note("calm")
        self.network.is_stormy = self.disk.is_stormy = False

    async def kill_by_plan(self) -> None:
        """Kill at the plan's instants, until the storm ends."""
        for kill in sorted(self.plan.kills, key=lambda k: k.at):
            await trio.sleep_until(kill.at)
            if kill.gently:
                self._stop(kill.victim)
            else:
                self.kill(kill.victim)
        await trio.sleep_until(STORM_SECONDS)

    def kill(self, name: str) -> None:
        """SIGKILL. The death of the ledger is the limiter's too (`rest_for_one`)."""
        also = {"ledger": (name, "limiter"), EVERYONE: self.names}
        for victim in also.get(name, (name,)):
            incarnation = self.actors.get(victim)
            if incarnation is not None and self._is_there(incarnation):
                self.note(f"KILL {victim}")
                self.counts["kills"] += 1
                incarnation.dead = True
                self.tree.cut_down(victim)

    def _stop(self, name: str) -> None:
        """SIGTERM, with a grace."""
        incarnation = self.actors.get(name)
        if incarnation is not None and self._is_there(incarnation) and not name.startswith("edge"):
            self.note(f"STOP {name}")
            self._nursery.start_soon(self._end, incarnation)

    async def _end(self, incarnation: Incarnation) -> None:
        incarnation.stopping = True
        await self.tree.stop(incarnation.name, grace=0.5)

    def _is_there(self, incarnation: Incarnation) -> bool:
        member = self.tree.tree.members.get(incarnation.name)
        return not incarnation.dead and member is not None and member.state != "down"

    async def _keep(self, name: str, *, task_status: trio.TaskStatus[None]) -> None:
        is_first = True
        while True:
            incarnation = self.actors[name] = Incarnation(name, self._make(name))
            _CURRENT.set(incarnation)
            try:
                await self.tree.start(name, incarnation.actor)
                if is_first:
                    task_status.started()
                    is_first = False
                self._bury(incarnation, await self.tree.gone(name))
            except ActorDown:
                pass
            except Exception as error:  # noqa: BLE001 - judged below
                self._bury(incarnation, error)
            del self.actors[name]
            _dispose(incarnation.actor)
            await trio.sleep(self.rng.choice((0.01, 0.1, 0.4)) * self.rng.random())

    def _bury(self, incarnation: Incarnation, error: BaseException | None) -> None:
        if error is not None and not (incarnation.dead or isinstance(error, goldens.Poisoned)):
            self.violation(f"{incarnation.name} crashed: {error!r}")
        incarnation.dead = True

    def _make(self, name: str) -> Actor:  # noqa: PLR0911 - one line for each kind
        match name.partition(".")[0]:
            case "ledger":
                return Ledger(LedgerSettings(prices=PRICES))
            case "limiter":
                limiter = Limiter(
                    LimiterSettings(concurrency=self.concurrency, sweep_every=2.0, sweep_after=4.0)
                )
                limiter.wall = _wall  # type: ignore[method-assign]
                return limiter
            case "safety" | "safety_fallback":
                return Safety(SafetySettings(str(self.state / "policy.toml")))
            case "router":
                return Router(RouterSettings((MODEL,), {"default": MODEL}))
            case "fast_answer":
                return FastAnswer(FastAnswerSettings(str(state.releases()), follow_every=30.0))
            case "batcher":
                return _Batcher(BatcherSettings("", MODEL, "scripted", step_seconds=self.pace, max_batch=4))
            case "session":
                return _Session(_session_settings())
            case _:
                return Edge(Patience(admission=6.0, host=2.0, reattach=8.0, read=3.0))

    # ------------------------------------------------------------------ disks

    def at_thread(self) -> None:
        """A call in a thread begins or has ended."""
        incarnation = _CURRENT.get()
        if not incarnation.dead and self.disk.thread_dies():
            self.kill(incarnation.name)

    def write(self, failure: type[Exception], write: Callable[[], None]) -> None:
        """Do a write of a journal, an outbox or the limiter as the plan has it. A dead process writes nothing."""
        incarnation = _CURRENT.get()
        self.counts["writes"] += 1
        if incarnation.dead:
            raise failure("the process is dead")
        fate = self.disk.next_write()
        if fate is not None:
            self.note(f"write of {incarnation.name}: {fate}")
        if fate == "fails" and failure is JournalError:
            raise failure("no space left on device")
        if fate == "before":
            self.kill(incarnation.name)
            raise failure("the process is dead")
        write()
        if fate == "after":
            self.kill(incarnation.name)


def _wall() -> float:
    import time  # the simulated one

    return time.time()


def _session_settings() -> SessionSettings:
    return SessionSettings(
        models={MODEL: ""},
        aliases={"default": MODEL},
        tokenizer="bytes",
        disconnect_grace=2.0,
        ask_timeout=1.0,
        safety_timeout=1.0,
        generate_timeout=3.0,
        silence=2.0,
    )


def _dispose(actor: Actor) -> None:
    """Give a dead process's descriptors back, as its kernel does."""
    for path in (
        "_host.journal",
        "_witnessing._outbox",
        "_books",
        "_state",
        "_accounts",
        "_release",
    ):
        found: Any = actor
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            found.close()


@contextmanager
def stores_of(world: Callable[[], World]) -> Iterator[None]:
    """Have every write of journals, outboxes and the limiter go through the world, and checkers' verdicts be seen by it."""
    journal_write, outbox_write, limits_write = Journal.write, WitnessOutbox._execute, LimitsState.write
    from actors import safety

    screen = safety.screen

    def seen(policy: Any, message: Any, checker: str) -> Any:
        answer = screen(policy, message, checker)
        if message.direction == "output":
            kept = world().screened.setdefault((message.request_id, message.choice), [])
            end = answer.verdict.end if type(answer.verdict).__name__ == "Allow" else 0
            kept.append((message.start, message.text, end))
        return answer

    def write(journal: Journal, records: Any) -> None:
        batch = list(records)
        world().write(JournalError, lambda: journal_write(journal, batch))

    def execute(outbox: WitnessOutbox, statement: str, rows: Any) -> None:
        if rows:
            world().write(OutboxError, lambda: outbox_write(outbox, statement, rows))

    def keep(state: LimitsState, changes: Any) -> None:
        world().write(sqlite3.OperationalError, lambda: limits_write(state, changes))

    with ExitStack() as stack:
        stack.enter_context(patch.object(safety, "screen", seen))
        stack.enter_context(patch.object(Journal, "write", write))
        stack.enter_context(patch.object(WitnessOutbox, "_execute", execute))
        stack.enter_context(patch.object(LimitsState, "write", keep))
        yield


def enter(incarnation: Incarnation) -> None:
    """What the current task does from now on is done in this process."""
    _CURRENT.set(incarnation)
