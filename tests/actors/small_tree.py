"""A tree for session and batcher tests: the real ones and the real checker, the others by script."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import trio
import trio.testing
from attrs import evolve, frozen

from actors import safety_policy
from actors.batcher import Batcher, BatcherSettings
from actors.prompt import ModelText
from actors.protocol import (
    Attach,
    Charge,
    Charged,
    ChatMessage,
    ChoiceDone,
    Consumed,
    ErrorBody,
    LimitExceeded,
    OpenTurn,
    Release,
    Reserve,
    Reserved,
    Route,
    Routed,
    Screen,
    Screened,
    Settle,
    Settled,
    TextDelta,
    TurnDone,
    TurnEvents,
    TurnFailed,
    TurnOpened,
    TurnRefused,
    Unroutable,
    Waive,
    Witness,
)
from actors.safety import Safety, SafetySettings
from actors.scripted_engine import BytesText, Script, ScriptedEngine, echo
from actors.session import Session
from actors.turn_host import SessionSettings
from gpu.sampling_params import SamplingParams
from supervision.actor import Actor, Sender
from supervision.errors import ActorDown, AskFailed
from supervision.local import Client, LocalTree
from tests.actors import virtual_time

POLICY = """
name = "canary"

[[rule]]
id = "canary.word"
category = "violence"
phrases = ["forbidden fruit"]
"""


def on_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test on trio's virtual clock."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            with trio.fail_after(3600):
                await test(*args, **kwargs)

        virtual_time.run(bounded)

    return run


@frozen
class Nothing:
    pass


class Limiter(Actor):
    """Says yes, or `refusal`; remembers what is open. Its state outlives it, as a real one's does."""

    Settings: ClassVar[type] = Nothing

    def __init__(self, books: Books) -> None:
        self.books = books

    async def on_message(self, message: Any, sender: Sender) -> Any:
        match message:
            case Reserve() if self.books.refusal is not None and message.tokens > self.books.tokens_left:
                return LimitExceeded(message.request_id, self.books.refusal)
            case Reserve():
                self.books.reserved[message.request_id] = message.tokens
                self.books.max_open = max(self.books.max_open, len(self.books.reserved))
                return Reserved(message.request_id, (("x-ratelimit-limit-requests", "60"),))
            case Settle():
                known = self.books.reserved.pop(message.request_id, None) is not None
                if known:
                    self.books.settled[message.request_id] = message.tokens
                return Settled(message.request_id, known)
            case Release():
                known = self.books.reserved.pop(message.request_id, None) is not None
                return Settled(message.request_id, known)
        return None


class Books:
    """What limiter and ledger keep on disk: it outlives them."""

    def __init__(self) -> None:
        self.reserved: dict[str, int] = {}
        self.settled: dict[str, int] = {}
        self.charges: dict[str, list[Charge]] = {}
        self.waived: set[str] = set()
        self.witnessed: dict[tuple[str, int], set[int]] = {}
        self.refusal: ErrorBody | None = None
        self.tokens_left = -1
        """Where there is a `refusal`: what may be reserved all the same."""
        self.max_open = 0
        self.context_length = 0
        """What the router says that the batcher has room for."""

    def tokens_of(self, request_id: str) -> dict[int, int]:
        """Positions charged for a request, by choice: the union, as the real books have it."""
        found: dict[int, set[int]] = {}
        for charge in self.charges.get(request_id, []):
            for choice, start, end in charge.spans:
                found.setdefault(choice, set()).update(range(start, end))
        return {choice: len(positions) for choice, positions in found.items()}


class Ledger(Actor):
    Settings: ClassVar[type] = Nothing

    def __init__(self, books: Books) -> None:
        self.books = books

    async def on_message(self, message: Any, sender: Sender) -> Any:
        match message:
            case Charge():
                self.books.charges.setdefault(message.request_id, []).append(message)
                return Charged(message.request_id, 1)
            case Waive():
                self.books.waived.add(message.request_id)
                return Charged(message.request_id, 0)
            case Witness():
                for event in message.events:
                    positions = self.books.witnessed.setdefault((event.request_id, event.choice), set())
                    positions.update(range(event.start, event.end))
                return Charged("", 0)
        return None


class Router(Actor):
    Settings: ClassVar[type] = Nothing

    def __init__(self, books: Books) -> None:
        self.books = books

    async def on_message(self, message: Any, sender: Sender) -> Any:
        if not isinstance(message, Route):
            return None
        if message.model != "small":
            error = ErrorBody(404, "invalid_request_error", "no such model", "model", "model_not_found")
            return Unroutable(message.request_id, error)
        names = [n for n in self.context.tree.up("batcher") if n not in message.avoid]
        if not names:
            error = ErrorBody(503, "service_unavailable_error", "none up", code="server_is_overloaded")
            return Unroutable(message.request_id, error)
        return Routed(message.request_id, names[0], "small", "only one", self.books.context_length)


CONTEXT_LENGTH = 2048
"""Short enough for every prompt that fits to be tokenised and checked in the loop."""


class SmallSession(Session):
    """A session host of a model with a short context."""

    async def _load_models(self) -> dict[str, ModelText]:
        return {"small": BytesText(CONTEXT_LENGTH)}


class InlineSafety(Safety):
    """Reads its policy in the loop: a virtual clock does not wait for threads."""

    async def on_start(self) -> None:
        self._policy = safety_policy.load(self._path)


class ScriptedBatcher(Batcher):
    """A batcher whose engine says what a test wants."""

    def __init__(self, settings: BatcherSettings, script: Script) -> None:
        super().__init__(settings)
        self._script = script

    def make_engine(self) -> ScriptedEngine:
        return ScriptedEngine(self._script, max_batch=self._settings.max_batch or 64)


class SmallTree:
    """`limiter`, `ledger`, `safety.0`, `router`, `batcher.0`, `session.0`, and the test as `edge.0`."""

    def __init__(self, tree: LocalTree, state: Path, script: Script, **session: Any) -> None:
        self.tree = tree
        self.state = state
        self.script = script
        self.books = Books()
        self.pace = 0.01
        self.policy = state / "policy.toml"
        self.policy.write_text(POLICY)
        self.session_settings = SessionSettings(
            models={"small": ""}, aliases={"default": "small"}, tokenizer="bytes", **session
        )
        self.edge: Client
        self._ids = itertools.count(1)

    def make(self, name: str) -> Actor:
        """Return a fresh actor for a name."""
        match name.partition(".")[0]:
            case "limiter":
                return Limiter(self.books)
            case "ledger":
                return Ledger(self.books)
            case "router":
                return Router(self.books)
            case "safety" | "safety_fallback":
                return InlineSafety(SafetySettings(str(self.policy)))
            case "batcher":
                return ScriptedBatcher(
                    BatcherSettings("", "small", "scripted", step_seconds=self.pace), self.script
                )
            case "session":
                return SmallSession(self.session_settings)
        raise ValueError(name)

    async def start(self, *names: str) -> None:
        """Start actors by name."""
        for name in names:
            await self.tree.start(name, self.make(name))

    async def restart(self, name: str) -> None:
        """SIGKILL, and the next incarnation."""
        await self.tree.restart(name, self.make(name))

    async def persist(self, client: Client, to: str, message: Any) -> Any:
        """Ask until somebody answers, as an edge does with a message that may be repeated."""
        while True:
            try:
                return await client.ask(to, message, timeout=5)
            except AskFailed:
                await trio.sleep(0.05)

    def opening(self, text: str, **fields: Any) -> OpenTurn:
        """Return a greedy first turn that asks `text`."""
        params = SamplingParams(fields.pop("max_tokens", 0), temperature=fields.pop("temperature", 0.0))
        params = evolve(
            params, **{k: fields.pop(k) for k in ("seed", "logprobs", "ignore_eos") if k in fields}
        )
        made = OpenTurn(
            f"turn-{next(self._ids)}", "acme", "key-1", "default", (ChatMessage("user", text),), params
        )
        return evolve(made, **fields)

    def reader(self, opening: OpenTurn, client: Client | None = None, **options: Any) -> Reading:
        """Return a reader of the turn, as an edge is one."""
        return Reading(client or self.edge, opening, **options)

    async def say(self, text: str, **fields: Any) -> Reading:
        """Open a turn and read all of it."""
        reading = self.reader(self.opening(text, **fields))
        await reading.run()
        return reading


class Reading:
    """What one edge does for one client: open, hear, confirm, attach again, and check that nothing is odd."""

    def __init__(self, client: Client, opening: OpenTurn, *, session: str = "session.0") -> None:
        self.client = client
        self.opening = opening
        self.session = session
        self.opened: TurnOpened | None = None
        self.refused: TurnRefused | None = None
        self.events: list[Any] = []
        self.consumes = True
        self.headers: dict[str, str] = {}
        self.epoch = 0

    @property
    def request_id(self) -> str:
        return self.opened.request_id if self.opened else self.opening.request_id

    @property
    def texts(self) -> list[str]:
        texts = [""] * self.opening.n
        for event in self.events:
            if isinstance(event, TextDelta):
                assert event.start == len(texts[event.choice]), "a gap or a repeat in the text"
                assert event.text, "an empty delta"
                texts[event.choice] += event.text
        return texts

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def reasons(self) -> list[str]:
        return [e.finish_reason for e in self.events if isinstance(e, ChoiceDone)]

    @property
    def last(self) -> Any:
        return self.events[-1]

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], TurnDone | TurnFailed)

    async def open(self) -> None:
        """Ask until the session answers, as an edge does when a session host dies under it."""
        await self._until_answered(self.opening)

    async def attach(self) -> None:
        """Come back after the last event that was heard."""
        await self._until_answered(
            Attach(self.request_id, self.opening.owner, len(self.events), self.opening.request_id)
        )

    async def _until_answered(self, message: OpenTurn | Attach) -> None:
        while True:
            self.epoch = self.client.tree.epoch(self.session)
            try:
                reply = await self.client.ask(self.session, message, timeout=60, owner=self.opening.owner)
            except ActorDown:
                await trio.sleep(0.05)
                continue
            if isinstance(reply, TurnRefused):
                self.refused = reply
            else:
                self.opened = reply
                self.headers = dict(reply.headers)
            return

    async def hear(self, message: TurnEvents) -> None:
        """Take events: each sequence once, in order."""
        for event in message.events:
            if event.sequence <= len(self.events):
                continue
            assert event.sequence == len(self.events) + 1, "an event is missing"
            self.events.append(event)
        if self.consumes:
            await self.confirm()

    async def confirm(self) -> None:
        """Say that the client took all of it."""
        message = Consumed(self.request_id, len(self.events), self.opening.request_id)
        with suppress(AskFailed):
            await self.client.tell(self.session, message)

    async def run(self) -> None:
        """Open, and hear until the end, through deaths of the session host."""
        await self.open()
        if self.refused is None:
            await self.finish()

    async def finish(self) -> None:
        """Hear until the end."""
        while not self.is_over:
            with trio.move_on_after(0.2):
                message, _ = await self.client.receive()
                if isinstance(message, TurnEvents) and message.reader == self.opening.request_id:
                    await self.hear(message)
            now = self.client.tree.epoch(self.session)
            if now not in (0, self.epoch):
                await self.attach()


@asynccontextmanager
async def small_tree(
    state: Path, script: Script = echo, *, leave_out: tuple[str, ...] = (), **session: Any
) -> AsyncIterator[SmallTree]:
    """Run a small tree; at the end every reservation must be closed."""
    async with LocalTree(state_dir=state) as tree:
        small = SmallTree(tree, state, script, **session)
        names = ("limiter", "ledger", "safety.0", "router", "batcher.0", "session.0")
        await small.start(*(name for name in names if name not in leave_out))
        small.edge = tree.client("edge.0")
        yield small


def script_of(text: str) -> Script:
    """Return a script that says the same to everybody."""
    return lambda _: text.encode()


async def settle_down(small: SmallTree) -> None:
    """Let what is under way end: some virtual seconds."""
    await trio.sleep(5)


__all__ = [
    "Books",
    "Reading",
    "Screen",
    "Screened",
    "SmallTree",
    "on_virtual_time",
    "script_of",
    "small_tree",
]
