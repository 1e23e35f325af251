"""A real edge on a real loopback port, with a scripted session host behind it."""

import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import openai
import trio
from attrs import define, field

from actors.edge.actor import Edge, EdgeSettings
from actors.edge.sampling import ModelInfo
from actors.protocol import (
    Allow,
    Attach,
    CancelTurn,
    ChoiceDone,
    Consumed,
    ErrorBody,
    Leave,
    Metrics,
    Moderate,
    Moderated,
    OpenTurn,
    ReadMetrics,
    ReadTurn,
    TextDelta,
    TextLogprob,
    TurnCancelled,
    TurnDone,
    TurnEvent,
    TurnEvents,
    TurnFailed,
    TurnOpened,
    TurnRecord,
    TurnRefused,
    Usage,
)
from store.accounts import Accounts
from supervision.actor import Actor, Sender
from supervision.local import LocalTree

GOLDEN = "The capital of France is Paris."
MODEL = ModelInfo("small", ("default",), context_length=2048, vocab_size=1000, created=1700000000)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PATIENCE = 300.0


def trio_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, with a limit that only ends one that hangs."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            with trio.fail_after(180):
                await test(*args, **kwargs)

        trio.run(limited)

    return run


def words(text: str) -> list[str]:
    return [w if i == 0 else f" {w}" for i, w in enumerate(text.split(" "))]


def reply_events(texts: list[str], finish: str = "stop", logprobs: bool = False) -> list[TurnEvent]:
    """The events of a turn whose choices have these texts, a word at a time, the choices interleaved."""
    made: list[TurnEvent] = []
    pieces = [words(text) for text in texts]
    starts = [0] * len(texts)
    for step in range(max(map(len, pieces))):
        for choice, parts in enumerate(pieces):
            if step < len(parts):
                lp = (
                    (TextLogprob(parts[step].encode(), -0.5, ((parts[step].encode(), -0.5),)),)
                    if logprobs
                    else ()
                )
                made.append(TextDelta(len(made) + 1, choice, starts[choice], parts[step], lp))
                starts[choice] += len(parts[step])
    for choice in range(len(texts)):
        made.append(ChoiceDone(len(made) + 1, choice, finish))
    made.append(TurnDone(len(made) + 1, Usage(12, sum(map(len, pieces)), 4)))
    return made


@define
class ScriptedTurn:
    opening: OpenTurn
    events: list[TurnEvent]
    readers: dict[str, tuple[str, int]] = field(factory=dict)
    """Who hears it, by reader name: actor, and the last event sent."""
    status: str = "in_progress"


@define
class Script:
    """What the session host does, and what it saw. Outlives the actor, as a journal does."""

    text: str = GOLDEN
    finish: str = "stop"
    events: list[TurnEvent] | None = None
    refuse: ErrorBody | None = None
    hold_after: int | None = None
    """Events up to this sequence are sent; the rest when it is raised (`release`)."""
    turns: dict[str, ScriptedTurn] = field(factory=dict)
    openings: list[OpenTurn] = field(factory=list)
    attaches: list[Attach] = field(factory=list)
    consumed: list[Consumed] = field(factory=list)
    left: list[Leave] = field(factory=list)
    headers: tuple[tuple[str, str], ...] = (("x-ratelimit-limit-requests", "100"),)
    twice: bool = False
    """Send everything twice."""
    skip: int | None = None
    """Lose this event the first time."""


class ScriptedSession(Actor):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def on_message(self, message: Any, sender: Sender) -> Any:  # noqa: C901, PLR0911 - a table of messages
        script = self.script
        match message:
            case OpenTurn():
                return self._open(message, sender)
            case Attach():
                script.attaches.append(message)
                turn = script.turns.get(message.request_id)
                if turn is None or turn.opening.owner != message.owner:
                    return TurnRefused(ErrorBody(404, "invalid_request_error", "no such turn"))
                turn.readers[message.reader or message.request_id] = (sender.name, message.after)
                self.context.nursery.start_soon(self.pump, turn)
                return self._opened(turn, message.after)
            case Consumed():
                script.consumed.append(message)
            case Leave():
                script.left.append(message)
                turn = script.turns.get(message.request_id)
                if turn is not None:
                    turn.readers.pop(message.reader or message.request_id, None)
            case ReadTurn():
                turn = script.turns.get(message.request_id)
                if turn is None or turn.opening.owner != message.owner:
                    return TurnRefused(ErrorBody(404, "invalid_request_error", "no such turn"))
                return record_of(turn)
            case CancelTurn():
                turn = script.turns[message.request_id]
                if turn.status == "in_progress":
                    turn.status = "cancelled"
                    seen = max((s for _, s in turn.readers.values()), default=0)
                    turn.events[seen:] = [
                        TurnFailed(seen + 1, ErrorBody(499, "cancelled", "cancelled", "", "turn_cancelled"))
                    ]
                    await self.pump(turn)
                return TurnCancelled(message.request_id)
            case ReadMetrics():
                return Metrics(("session_up 1",))
        return None

    def _open(self, message: OpenTurn, sender: Sender) -> Any:
        script = self.script
        script.openings.append(message)
        if script.refuse is not None:
            return TurnRefused(script.refuse)
        same = [
            t
            for t in script.turns.values()
            if message.idempotency_key and t.opening.idempotency_key == message.idempotency_key
        ]
        turn = same[0] if same else script.turns.get(message.request_id)
        replayed = turn is not None
        if turn is None:
            events = script.events or reply_events(
                [script.text] * message.n, script.finish, message.params.logprobs >= 0
            )
            turn = script.turns[message.request_id] = ScriptedTurn(message, list(events))
        turn.readers[message.request_id] = (sender.name, 0)
        self.context.nursery.start_soon(self.pump, turn)
        return self._opened(turn, 0, replayed)

    def _opened(self, turn: ScriptedTurn, after: int, replayed: bool = False) -> TurnOpened:
        opening = turn.opening
        return TurnOpened(
            opening.request_id, opening.model, 1700000001, 12, self.script.headers, after, replayed
        )

    async def pump(self, turn: ScriptedTurn) -> None:
        """Send each reader what it may have."""
        await trio.lowlevel.checkpoint()
        script = self.script
        through = len(turn.events) if script.hold_after is None else script.hold_after
        if through >= len(turn.events) and turn.status == "in_progress":
            turn.status = "completed" if isinstance(turn.events[-1], TurnDone) else "failed"
        for name, (actor, after) in list(turn.readers.items()):
            events = tuple(turn.events[after:through])
            if script.skip is not None:
                events = tuple(e for e in events if e.sequence != script.skip)
                script.skip = None
            if events and name in turn.readers:
                turn.readers[name] = (actor, through)
                for _ in range(2 if script.twice else 1):
                    await self.context.tell(
                        actor, TurnEvents(turn.opening.request_id, events, allows(turn), name)
                    )

    async def release(self, through: int | None = None) -> None:
        """Let more events out: all, or up to a sequence."""
        self.script.hold_after = through
        for turn in self.script.turns.values():
            await self.pump(turn)


def allows(turn: ScriptedTurn) -> tuple[Allow, ...]:
    rid = turn.opening.request_id
    return tuple(Allow(rid, "output", c, 10**9, "test", "test") for c in range(turn.opening.n))


def record_of(turn: ScriptedTurn) -> TurnRecord:
    opening = turn.opening
    texts = tuple(
        "".join(e.text for e in turn.events if isinstance(e, TextDelta) and e.choice == c)
        for c in range(opening.n)
    )
    finishes = tuple(e.finish_reason for e in turn.events if isinstance(e, ChoiceDone))
    last = turn.events[-1]
    done = turn.status == "completed"
    return TurnRecord(
        opening.request_id,
        opening.model,
        1700000001,
        turn.status,
        texts,
        finishes,
        last.usage if isinstance(last, TurnDone) and done else Usage(12, 3),
        opening.background,
        last.error if isinstance(last, TurnFailed) else None,
        opening.metadata,
        len(turn.events),
        opening.store,
        last.fast_answer if isinstance(last, TurnDone) else "",
        opening.echo,
    )


class Answering(Actor):
    """Stands for an actor that is up and answers."""

    async def on_message(self, message: Any, sender: Sender) -> Any:
        if isinstance(message, Moderate):
            return Moderated(
                tuple(("violence",) if "kill" in text else () for text in message.inputs), "policy-digest"
            )
        return Metrics(("answering_up 1",))


@define
class Door:
    tree: LocalTree
    script: Script
    session: ScriptedSession
    port: int
    secret: str
    accounts: Accounts
    edge: Edge

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.root, headers=self.headers, timeout=PATIENCE, verify=False)  # noqa: S501 - no TLS here, and its set-up is slow

    async def post(
        self, body: Any = None, path: str = "/v1/chat/completions", **options: Any
    ) -> httpx.Response:
        async with self.http() as client:
            return await client.post(path, **({"json": body} if body is not None else {}), **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        async with self.http() as client:
            return await client.get(path, **options)

    async def golden(self) -> None:
        """A good request must give the golden text."""
        answer = await self.post(chat())
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == GOLDEN

    async def sdk(self, call: Callable[[openai.OpenAI], Any], **options: Any) -> Any:
        """Run the real SDK's blocking client in a thread."""
        settings = {"max_retries": 0, "timeout": PATIENCE, **options}

        def use() -> Any:
            with openai.OpenAI(base_url=f"{self.root}/v1", api_key=self.secret, **settings) as client:
                return call(client)

        return await trio.to_thread.run_sync(use)

    async def raw(self, data: bytes, *, close_write: bool = False) -> bytes:
        """Send bytes, and return what comes until the server closes."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            try:
                await stream.send_all(data)
                if close_write:
                    await stream.send_eof()
            except trio.BrokenResourceError:
                return b""
            return await read_all(stream)

    async def restart_session(self) -> None:
        self.session = ScriptedSession(self.script)
        await self.tree.restart("session.0", self.session)


async def read_all(stream: trio.SocketStream) -> bytes:
    got = b""
    with trio.fail_after(PATIENCE):
        while True:
            try:
                data = await stream.receive_some(65536)
            except trio.BrokenResourceError:
                return got
            if not data:
                return got
            got += data


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; the limit only ends a test that hangs."""
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - it looks at state that has no event
            await trio.sleep(0.002)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": MESSAGES, **fields}


@asynccontextmanager
async def door(
    tmp_path: Path, script: Script | None = None, *, kinds: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Door]:
    script = script or Script()
    accounts = Accounts(tmp_path / "accounts.sqlite")
    _, secret = accounts.create_key("acme", "test")
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    session, edge = (
        ScriptedSession(script),
        Edge(EdgeSettings((MODEL,), str(tmp_path / "accounts.sqlite"), **settings)),
    )
    try:
        async with LocalTree() as tree:
            await tree.start("session.0", session)
            for kind in kinds:
                await tree.start(kind, Answering())
            await tree.start("edge.0", edge, files={"listen": listening.fileno()})
            yield Door(tree, script, session, listening.getsockname()[1], secret, accounts, edge)
    finally:
        listening.close()
        accounts.close()


def sse_events(body: str) -> list[str]:
    """The data of each event; fails on anything that is neither an event nor a comment."""
    made = []
    for block in body.split("\n\n")[:-1]:
        assert block.startswith(("data: ", ":")), block
        assert "\n" not in block
        if block.startswith("data: "):
            made.append(block.removeprefix("data: "))
    assert body.endswith("\n\n")
    return made


def threads() -> int:
    return threading.active_count()
