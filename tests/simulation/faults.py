"""What goes wrong, drawn from a seed before it begins: the network, the journals, and who is killed when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from attrs import define, field, frozen

from supervision.envelope import Envelope
from supervision.memory import SeededFaults

At = Literal["before", "after", "fails"]

STORM_SECONDS = 2.0
"""How long faults go on, on the virtual clock. Then all is quiet, and everything must come right."""


EVERYONE = "*"
"""The supervisor dies, and the whole tree with it."""


@frozen
class Kill:
    """An actor is killed at an instant; or, `gently`, asked to stop, as when it is replaced by a newer one."""

    at: float
    victim: str
    gently: bool = False


@frozen
class Partition:
    """Between two actors nothing gets through for a while."""

    pair: frozenset[str]
    start: float
    end: float


@frozen
class Plan:
    """Everything that goes wrong in one seed."""

    kills: tuple[Kill, ...]
    partitions: tuple[Partition, ...]
    lose: float
    repeat: float
    delay: float
    delay_at_most: float
    killed_messages: dict[int, Literal["sender", "receiver"]]
    """At the n-th message of the storm one of its two ends is killed as it arrives."""
    writes: dict[int, At]
    """The n-th write of a journal, an outbox or the limiter: its actor is killed before or after it, or, of a
    journal, the disk takes nothing."""
    threads: frozenset[int]
    """At the n-th begin or end of work in a thread its actor is killed."""


def draw(rng: random.Random, actors: Sequence[str]) -> Plan:
    """Draw a plan. Each kind of fault is left out of some seeds, so that the others are seen by themselves."""
    behind = [name for name in actors if not name.startswith("edge")]
    victims = [*behind, *behind, *actors, EVERYONE]
    worst = rng.choice((0.0, 0.0, 0.02, 0.1, 0.3))
    return Plan(
        kills=tuple(
            Kill(rng.uniform(0.0, STORM_SECONDS), rng.choice(victims), gently=rng.random() < 0.15)
            for _ in range(rng.choice((0, 1, 2, 4, 8)))
        ),
        partitions=tuple(_partition(rng, actors) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
        lose=worst * rng.random(),
        repeat=worst * rng.random(),
        delay=rng.choice((0.0, 0.0, 0.02, 0.1, 0.5)),
        delay_at_most=rng.choice((0.02, 0.2, 1.0, 8.0)),
        killed_messages={
            rng.randrange(1, 400): rng.choice(("sender", "receiver")) for _ in range(rng.choice((0, 0, 1, 3)))
        },
        writes=_writes(rng),
        threads=frozenset(rng.randrange(1, 60) for _ in range(rng.choice((0, 0, 1, 3)))),
    )


def _partition(rng: random.Random, actors: Sequence[str]) -> Partition:
    start = rng.uniform(0.0, STORM_SECONDS)
    pair = frozenset(rng.sample(list(actors), 2))
    return Partition(pair, start, min(STORM_SECONDS, start + rng.uniform(0.05, 2.0)))


def _writes(rng: random.Random) -> dict[int, At]:
    drawn: dict[int, At] = {}
    for _ in range(rng.choice((0, 0, 1, 3))):
        at, what = rng.randrange(1, 150), rng.choice(("before", "after", "fails"))
        for following in range(rng.choice((1, 1, 10)) if what == "fails" else 1):
            drawn[at + following] = what
    return drawn


@define
class Network:
    """The hub's `fault`: does to each message what the plan says, while the storm lasts."""

    plan: Plan
    rng: random.Random
    now: Callable[[], float]
    kill: Callable[[str], None]
    heard: Callable[[Envelope, Sequence[float]], None]
    is_stormy: bool = True
    count: int = 0
    _weather: SeededFaults = field(init=False)

    def __attrs_post_init__(self) -> None:
        plan = self.plan
        self._weather = SeededFaults(self.rng, plan.lose, plan.repeat, plan.delay, plan.delay_at_most)

    def __call__(self, envelope: Envelope) -> Sequence[float]:
        """Return the delay of each copy that arrives."""
        copies = self._copies(envelope) if self.is_stormy else [0.0]
        self.heard(envelope, copies)
        return copies

    def _copies(self, envelope: Envelope) -> Sequence[float]:
        self.count += 1
        end = self.plan.killed_messages.get(self.count)
        if end is not None:
            self.kill(envelope.sender if end == "sender" else envelope.to)
        if self._is_parted(envelope):
            return []
        return self._weather(envelope)

    def _is_parted(self, envelope: Envelope) -> bool:
        if not self.plan.partitions:
            return False
        now, pair = self.now(), {envelope.sender, envelope.to}
        return any(p.start <= now < p.end and p.pair == pair for p in self.plan.partitions)


@define
class Disk:
    """Counts the writes of journals, outboxes and the limiter, and says what becomes of each."""

    plan: Plan
    is_stormy: bool = True
    count: int = 0
    threads: int = 0

    def next_write(self) -> At | None:
        """Return what becomes of the write at hand; None: it succeeds."""
        if not self.is_stormy:
            return None
        self.count += 1
        return self.plan.writes.get(self.count)

    def thread_dies(self) -> bool:
        """Whether the actor is killed at this end of work in a thread."""
        if not self.is_stormy:
            return False
        self.threads += 1
        return self.threads in self.plan.threads
