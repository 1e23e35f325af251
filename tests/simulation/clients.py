"""Clients that do what clients do: read, dawdle, leave, lose their edge, come back, cancel, ask twice."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Literal

import trio
from attrs import define, evolve, field, frozen

from actors.edge import hosts, request_ids
from actors.edge.errors import ApiError
from actors.edge.streaming import Listener
from actors.protocol import (
    ChatMessage,
    ChoiceDone,
    ErrorBody,
    OpenTurn,
    TextDelta,
    TurnEvent,
    TurnFailed,
)
from gpu.sampling_params import SamplingParams
from tests.simulation import goldens
from tests.simulation.faults import STORM_SECONDS
from tests.simulation.goldens import Golden, golden
from tests.simulation.world import Edge, World, enter

KEEPALIVE = 2.0
"""Seconds after which an edge whose stream is silent looks whether it has missed something."""
MAX_ATTEMPTS = 60

Behaviour = Literal["stay", "cancel", "leave", "return", "background"]


@frozen
class Wish:
    """What one client wants, and how it goes about it. Times are virtual seconds."""

    name: str
    owner: str
    question: str
    params: SamplingParams
    n: int
    stops: tuple[str, ...]
    include_stop: bool
    key: str
    stream: bool
    behaviour: Behaviour
    start: float
    patience: float
    """From its start until it cancels or leaves."""
    dawdle: float
    """How long it takes to read what it was handed."""
    deadline: float = 600.0

    @property
    def is_answerable(self) -> bool:
        """The catalog has it."""
        return self.question == goldens.QUESTION

    @property
    def is_poison(self) -> bool:
        """It kills every batcher that takes it."""
        return "|poison|" in self.question

    @property
    def is_bad(self) -> bool:
        """The policy refuses it."""
        return goldens.CANARY in self.question

    def golden(self, choice: int) -> Golden:
        """Return what this choice must be."""
        params = self.params
        return golden(
            self.question,
            temperature=params.temperature,
            seed=params.seed + choice,
            max_tokens=params.max_tokens,
            stops=self.stops,
            include=self.include_stop,
        )

    def opening(self, host: str, *, is_retry: bool) -> OpenTurn:
        """Return a fresh request for it, as an edge makes one."""
        return OpenTurn(
            request_ids.mint(host),
            self.owner,
            f"key-{self.owner}",
            "default",
            (ChatMessage("user", self.question),),
            self.params,
            n=self.n,
            stop=self.stops,
            include_stop=self.include_stop,
            stream=self.stream,
            background=self.behaviour == "background",
            idempotency_key=self.key,
            body_digest=f"digest of {self.name}",
            is_retry=is_retry,
            fast_answers=self.is_answerable,
            deadline=self.deadline,
        )


def draw(rng: random.Random, number: int) -> Wish:
    """Draw a client's wish."""
    owner = rng.choice(("acme", "globex"))
    flavour = rng.choice(("good",) * 20 + ("bad",) * 4 + ("poison",))
    question = f"{owner}|c{number}|{flavour}|{rng.choice((3, 12, 20, 32))}"
    special = rng.random()
    if special < 0.08:
        question = goldens.QUESTION
    elif special < 0.12:
        question = f"a {goldens.CANARY}?"
    sampled = rng.random() < 0.3
    plain = question == goldens.QUESTION
    behaviours: tuple[Behaviour, ...] = ("stay", "stay", "stay", "cancel", "leave", "return", "background")
    return Wish(
        name=f"c{number}",
        owner=owner,
        question=question,
        params=SamplingParams(
            0 if plain else rng.choice((0, 0, 0, 1, 10, 30)),
            temperature=1.0 if sampled else 0.0,
            seed=rng.randrange(1000) if sampled else 0,
            logprobs=-1 if plain else rng.choice((-1, -1, -1, 1)),
        ),
        n=1 if plain else rng.choice((1, 1, 1, 1, 2, 3)),
        stops=() if plain else rng.choice(((), (), ("STOP",), ("naïve p", "🙂 ", "zzz"))),
        include_stop=rng.random() < 0.3,
        key=f"key of c{number}" if rng.random() < 0.5 else "",
        stream=rng.random() < 0.7,
        behaviour=rng.choice(behaviours),
        start=rng.uniform(0.0, STORM_SECONDS / 2),
        patience=rng.choice((0.02, 0.2, 0.5, 1.0)) * rng.random(),
        dawdle=rng.choice((0.0, 0.0, 0.0, 0.05)),
        deadline=rng.choice((600.0,) * 9 + (0.3,)),
    )


@define(eq=False)
class Attempt:
    """One HTTP request: what was asked, what was heard, how it ended."""

    wish: Wish
    opening: OpenTurn
    turn: str = ""
    """The request id of the turn it heard, once that was opened."""
    events: list[TurnEvent] = field(factory=list)
    ending: Literal["", "heard", "refused", "broken", "cut", "left"] = ""
    error: ErrorBody | None = None
    is_over: trio.Event = field(factory=trio.Event)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    cancelled_at: float = 0.0

    @property
    def last(self) -> TurnEvent | None:
        """The last event that was heard."""
        return self.events[-1] if self.events else None

    @property
    def texts(self) -> list[str]:
        """What the client has of each choice."""
        texts = [""] * self.wish.n
        for event in self.events:
            if isinstance(event, TextDelta):
                texts[event.choice] += event.text
        return texts

    @property
    def reasons(self) -> dict[int, str]:
        """Why each choice ended."""
        return {e.choice: e.finish_reason for e in self.events if isinstance(e, ChoiceDone)}


@define(eq=False)
class Client:
    """Runs a wish to its end: until it has its answer, or no longer wants it."""

    world: World
    wish: Wish
    edges: tuple[str, ...]
    rng: random.Random
    attempts: list[Attempt] = field(factory=list)
    is_over: bool = False
    has_left: bool = False
    has_cancelled: bool = False

    async def run(self) -> None:
        """Ask, and ask again, as the SDK does after a 5xx or a broken connection."""
        await trio.sleep(self.wish.start)
        pause = 0.05
        while not self.is_over and len(self.attempts) < MAX_ATTEMPTS:
            attempt = await self._attempt()
            self.world.note(f"{self.wish.name}: {attempt.ending} {attempt.error or attempt.last}")
            self.is_over = self._is_content(attempt)
            if not self.is_over:
                await trio.sleep(pause * self.rng.uniform(0.5, 1.0))
                pause = min(1.0, 2 * pause)
        if not self.is_over:
            self.world.violation(f"{self.wish.name} had no answer in {MAX_ATTEMPTS} attempts")

    def _is_content(self, attempt: Attempt) -> bool:
        if attempt.ending == "left":
            self.has_left = True
            return self.wish.behaviour == "leave"
        if attempt.ending == "refused":
            return attempt.error is not None and attempt.error.status in (400, 404)
        if attempt.ending != "heard":
            return False
        last = attempt.last
        if isinstance(last, TurnFailed) and last.error.code == "deadline_exceeded":
            return self.wish.deadline < 100
        if isinstance(last, TurnFailed) and last.error.code == "engine_failed" and self.wish.is_poison:
            return True
        return not (isinstance(last, TurnFailed) and last.error.status >= 500)

    async def _attempt(self) -> Attempt:
        edge = await self._an_edge()
        host = self._host(edge)
        turn = next((a.turn for a in reversed(self.attempts) if a.turn), "")
        attempt = Attempt(self.wish, self.wish.opening(host, is_retry=bool(self.attempts)))
        comes_back = self.wish.behaviour == "background" and turn and not self._failed(turn)
        if comes_back:
            attempt.turn = turn
        self.attempts.append(attempt)
        edge.context.nursery.start_soon(self._in_edge, edge, attempt, host, bool(comes_back))
        await attempt.is_over.wait()
        return attempt

    def _failed(self, turn: str) -> bool:
        return any(a.turn == turn and isinstance(a.last, TurnFailed) for a in self.attempts)

    async def _an_edge(self) -> Edge:
        while True:
            name = self.rng.choice(self.edges)
            incarnation = self.world.actors.get(name)
            if incarnation is not None and not incarnation.dead and self.world.tree.tree.epoch(name):
                assert isinstance(incarnation.actor, Edge)
                return incarnation.actor
            await trio.sleep(0.01)

    def _host(self, edge: Edge) -> str:
        key = hosts.key_of(
            conversation="",
            idempotency_key=self.wish.key,
            owner=self.wish.owner,
            digest=f"digest of {self.wish.name}",
        )
        return hosts.rendezvous(key, hosts.members(edge.context.tree))[0]

    # ------------------------------------------------------------------ inside an edge

    async def _in_edge(self, edge: Edge, attempt: Attempt, host: str, comes_back: bool) -> None:
        enter(self.world.actors[edge.context.name])
        attempt.ending = "cut"
        try:
            with attempt.scope:
                await self._converse(edge, attempt, host, comes_back)
            if attempt.scope.cancelled_caught:
                attempt.ending = "left"
        except ApiError as error:
            attempt.ending, attempt.error = "refused", error.body
        except Exception as error:  # noqa: BLE001 - a bug of the edge's side
            self.world.violation(f"{self.wish.name}: {error!r}")
        finally:
            attempt.is_over.set()

    async def _converse(self, edge: Edge, attempt: Attempt, host: str, comes_back: bool) -> None:
        if comes_back:
            _, reader = await edge.turns.attach(attempt.turn, self.wish.owner)
        else:
            self._set_alarm(edge, attempt)
            opened, reader = await edge.turns.open(attempt.opening, host)
            attempt.turn = opened.request_id
            self.world.note(f"{self.wish.name}: opened {opened.request_id} replayed={opened.replayed}")
            if self.rng.random() < 0.1:
                edge.context.nursery.start_soon(self._snoop, edge, attempt.turn)
        try:
            if self.wish.behaviour == "background" and not comes_back:
                attempt.ending = "left"
                return
            listener = Listener(edge.turns, reader)
            while not (reader.ended and reader.drained):
                attempt.events += await listener.wait(KEEPALIVE)
                await trio.sleep(self.wish.dawdle)
            await listener.wait(0)
            attempt.ending, attempt.error = ("broken", reader.broken) if reader.broken else ("heard", None)
        finally:
            edge.turns.close(reader)

    async def _snoop(self, edge: Edge, turn: str) -> None:
        """Another owner tries to hear the turn."""
        with suppress(ApiError):
            other = "globex" if self.wish.owner == "acme" else "acme"
            _, reader = await edge.turns.attach(turn, other)
            edge.turns.close(reader)
            self.world.violation(f"D: {other} heard {turn} of {self.wish.owner}")

    def _set_alarm(self, edge: Edge, attempt: Attempt) -> None:
        if self.has_left or self.has_cancelled:
            return
        if self.wish.behaviour in ("leave", "return"):
            attempt.scope.deadline = trio.current_time() + self.wish.patience
        elif self.wish.behaviour == "cancel":
            edge.context.nursery.start_soon(self._cancel, edge, attempt)

    async def _cancel(self, edge: Edge, attempt: Attempt) -> None:
        await trio.sleep(self.wish.patience)
        if attempt.turn and not attempt.is_over.is_set():
            self.has_cancelled = True
            with suppress(ApiError):
                await edge.turns.cancel(attempt.turn, self.wish.owner)
                attempt.cancelled_at = trio.current_time()


def probe(number: int) -> Wish:
    """Return a good client's wish: after anything, the next one gets the golden text."""
    wish = draw(random.Random(0), number)
    return evolve(
        wish,
        question=f"{wish.owner}|c{number}|good|8",
        params=SamplingParams(0, temperature=0.0),
        behaviour="stay",
        start=0.0,
        n=1,
        stops=(),
        dawdle=0.0,
        deadline=600.0,
    )
