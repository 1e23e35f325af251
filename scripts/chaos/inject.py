"""The faults: what each does to the tree, and the proof that it really fired."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from attrs import define, frozen

from actors.batcher import POISON_SEED
from actors.turn_generation import MAX_DEATHS
from scripts import credentials
from scripts.chaos.frames import FrameProxy
from scripts.chaos.plan import FaultPlan
from supervision.chaos_disk import switch_of
from supervision.chaos_hooks import CLOCK_STEP, SPIN
from supervision.status import ActorStatus, NotRunning, read_status

SHARE = 0.2
"""Of the frames that pass a proxy, how many meet a fate."""
SMALL_DISK = 1 << 30
WHOLE_TREE = {"kill_supervisor", "disk_full", "slow_disk", "poison"}
"""Faults without one target."""
HEALING = 120.0
"""Seconds after which an actor that did not come back counts as lost."""


class NotFired(Exception):
    """The fault could not be injected; the text says why."""


@frozen
class Injection:
    """One fault of the plan, with its target drawn."""

    plan: FaultPlan
    target: str
    """An actor kind; "" for a fault without one."""


@define
class Tree:
    """The tree under test, as seen and hurt from outside."""

    state: Path
    supervisor_pid: Callable[[], int]
    restart: Callable[[], None]
    """Start `serve` again on the same state after the supervisor was killed."""

    def actors(self, kind: str = "") -> list[ActorStatus]:
        """Return the actors of a kind that are up; of every kind for ""."""
        with contextlib.suppress(NotRunning, OSError):
            return [
                a
                for a in read_status(self.state)
                if a.state == "up" and (not kind or kind_of(a.name) == kind)
            ]
        return []

    def one(self, kind: str, rng: random.Random) -> ActorStatus:
        """Draw one live actor of a kind, waiting for one to be up."""
        for _ in _patiently():
            found = self.actors(kind)
            if found:
                return rng.choice(found)
        raise NotFired(f"no {kind or 'actor'} came up within {HEALING:.0f} s")

    def heal(self, name: str, epoch: int) -> None:
        """Wait for the next incarnation of an actor. Raises `NotFired` when none comes."""
        for _ in _patiently():
            if any(a.name == name and a.epoch > epoch for a in self.actors()):
                return
        raise NotFired(f"{name} did not come back within {HEALING:.0f} s")


def kind_of(name: str) -> str:
    """Return an actor's kind: `safety.0` is a `safety`."""
    head, _, tail = name.rpartition(".")
    return head if tail.isdigit() else name


def schedule(faults: tuple[FaultPlan, ...], kinds: list[str], rng: random.Random) -> list[Injection]:
    """Return every fault of the plan in a seeded order, its targets drawn in turn."""
    drawn = []
    for fault in faults:
        targets = fault.targets or tuple(kinds)
        drawn += [
            Injection(fault, targets[i % len(targets)] if fault.kind not in WHOLE_TREE else "")
            for i in range(fault.count)
        ]
    rng.shuffle(drawn)
    return drawn


def inject(tree: Tree, injection: Injection, rng: random.Random) -> str:
    """Do it, wait until it is over, and return what was hit. Raises `NotFired`."""
    return FAULTS[injection.plan.kind](tree, injection, rng)


def _kill(tree: Tree, injection: Injection, rng: random.Random) -> str:
    victim = tree.one(injection.target, rng)
    _signal(victim, signal.SIGKILL)
    tree.heal(victim.name, victim.epoch)
    return f"{victim.name} (pid {victim.pid})"


def _kill_twice(tree: Tree, injection: Injection, rng: random.Random) -> str:
    victim = tree.one(injection.target, rng)
    _signal(victim, signal.SIGKILL)
    for _ in _patiently():
        with contextlib.suppress(NotRunning, OSError):
            successor = next(a for a in read_status(tree.state) if a.name == victim.name)
            if successor.pid and successor.pid != victim.pid:
                _signal(successor, signal.SIGKILL)
                tree.heal(victim.name, successor.epoch)
                return f"{victim.name} (pids {victim.pid}, {successor.pid})"
    raise NotFired(f"{victim.name}: no successor was seen")


def _stop(tree: Tree, injection: Injection, rng: random.Random) -> str:
    victim = tree.one(injection.target, rng)
    _signal(victim, signal.SIGSTOP)
    tree.heal(victim.name, victim.epoch)
    return f"{victim.name} (pid {victim.pid}) until the watchdog"


def _pause(tree: Tree, injection: Injection, rng: random.Random) -> str:
    victim = tree.one(injection.target, rng)
    _signal(victim, signal.SIGSTOP)
    time.sleep(injection.plan.seconds)
    with contextlib.suppress(NotFired):
        _signal(victim, signal.SIGCONT)
    return f"{victim.name} (pid {victim.pid}) for {injection.plan.seconds} s"


def _kill_supervisor(tree: Tree, _injection: Injection, _rng: random.Random) -> str:
    pid = tree.supervisor_pid()
    os.kill(pid, signal.SIGKILL)
    tree.restart()
    return f"the supervisor (pid {pid}) and with it the tree"


def _frames(tree: Tree, injection: Injection, rng: random.Random) -> str:
    """Kill the target, so that everyone dials anew, and be there first."""
    victim = tree.one(injection.target, rng)
    mailbox = tree.state / "run" / f"{victim.name}.ipc"
    was = _identity(mailbox)
    _signal(victim, signal.SIGKILL)
    proxy = FrameProxy(mailbox, injection.plan.frames, SHARE, rng)
    for _ in _patiently(0.001):
        with contextlib.suppress(OSError):
            if _identity(mailbox) != was:
                proxy.start()
                break
    else:
        raise NotFired(f"{victim.name} made no new mailbox")
    time.sleep(injection.plan.seconds)
    proxy.stop()
    tree.heal(victim.name, victim.epoch)
    if sum(proxy.counts.values()) == proxy.counts["passed"]:
        raise NotFired(
            f"{victim.name}: no frame was touched in {injection.plan.seconds} s ({proxy.counts['passed']} passed)"
        )
    return f"{victim.name}: " + ", ".join(f"{count} {fate}" for fate, count in proxy.counts.items())


def _identity(mailbox: Path) -> tuple[int, int]:
    """Return what tells one socket file from its successor: a freed inode number is often given out again at once."""
    found = mailbox.stat()
    return found.st_ino, found.st_ctime_ns


def _by_signal(number: signal.Signals, what: str) -> Callable[[Tree, Injection, random.Random], str]:
    """Return a fault that the actors' own chaos hooks carry out (`supervision/chaos_hooks.py`)."""

    def fault(tree: Tree, injection: Injection, rng: random.Random) -> str:
        victim = tree.one(injection.target, rng)
        _demand_hooks(victim)
        _signal(victim, number)
        if number is SPIN:
            tree.heal(victim.name, victim.epoch)
        return f"{victim.name} (pid {victim.pid}): {what}"

    return fault


def _demand_hooks(victim: ActorStatus) -> None:
    with contextlib.suppress(OSError):
        if b"ANTIPHON_CHAOS=1" in Path(f"/proc/{victim.pid}/environ").read_bytes():
            return
    raise NotFired(f"{victim.name} was not started with ANTIPHON_CHAOS=1")


def _disk_full(tree: Tree, injection: Injection, _rng: random.Random) -> str:
    """Fill the state's file system. Only where it is a small one of its own, as the run's own tree has it."""
    usage = shutil.disk_usage(tree.state)
    if usage.total > SMALL_DISK:
        raise NotFired(
            f"{tree.state} lies on a disk of {usage.total >> 20} MiB: filling that would hurt others"
        )
    filler = tree.state / "filler"
    with filler.open("wb", buffering=0) as sink, contextlib.suppress(OSError):
        while True:
            sink.write(bytes(4096))
    time.sleep(injection.plan.seconds)
    size = filler.stat().st_size
    filler.unlink()
    return f"{size >> 20} MiB filled for {injection.plan.seconds} s"


def _slow_disk(tree: Tree, injection: Injection, rng: random.Random) -> str:
    """Have every actor's commits and flushes wait; what they wrote of it is the proof."""
    _demand_hooks(tree.one("", rng))
    switch = switch_of(tree.state)
    switch.touch()
    try:
        time.sleep(injection.plan.seconds)
    finally:
        waits = [int(line) for line in switch.read_text(encoding="ascii").splitlines()]
        switch.unlink()
    if not waits:
        raise NotFired(f"nothing was committed in {injection.plan.seconds} s")
    return f"{len(waits)} commits and flushes took {sum(waits) / len(waits):.0f} ms each"


def _poison(tree: Tree, _injection: Injection, rng: random.Random) -> str:
    """Ask what no batcher survives: so many die of it, then it is refused, and they are up again."""
    _demand_hooks(tree.one("batcher", rng))
    before = _batcher_deaths(tree)
    door = credentials.read(tree.state)
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "This request kills batchers."}],
        "seed": POISON_SEED,
        "fast_answers": "off",
    }
    try:
        answer = httpx.post(
            f"{door.base_url}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {door.api_key}"},
            timeout=HEALING,
        )
    except httpx.TransportError as error:
        raise NotFired(f"the poison was not answered: {type(error).__name__}") from error
    tree.one("batcher", rng)
    deaths = _batcher_deaths(tree) - before
    if "engine_failed" not in answer.text or deaths != MAX_DEATHS:
        raise NotFired(f"{deaths} batchers died of the poison, answered with {answer.text[:200]}")
    return f"{deaths} batchers, then refused with status {answer.status_code}"


def _batcher_deaths(tree: Tree) -> int:
    return sum(a.restarts for a in read_status(tree.state) if kind_of(a.name) == "batcher")


def _signal(victim: ActorStatus, number: int) -> None:
    try:
        os.kill(victim.pid, number)
    except ProcessLookupError as error:
        raise NotFired(f"{victim.name} (pid {victim.pid}) was gone already") from error


def _patiently(pause: float = 0.01) -> Iterator[None]:
    end = time.monotonic() + HEALING
    while time.monotonic() < end:
        yield
        time.sleep(pause)


FAULTS: dict[str, Callable[[Tree, Injection, random.Random], str]] = {
    "kill": _kill,
    "kill_twice": _kill_twice,
    "stop": _stop,
    "pause": _pause,
    "kill_supervisor": _kill_supervisor,
    "frames": _frames,
    "spin": _by_signal(SPIN, "a busy loop"),
    "clock_step": _by_signal(CLOCK_STEP, "the wall clock stepped"),
    "disk_full": _disk_full,
    "slow_disk": _slow_disk,
    "poison": _poison,
}
