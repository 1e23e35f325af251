"""The root process: builds the tree from its data, runs it, drains it on SIGTERM."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from supervision import prctl
from supervision.child import Launcher
from supervision.group import Group
from supervision.roster import Roster
from supervision.spawn import ProcessLauncher
from supervision.spec import ChildSpec, SupervisorSpec
from supervision.state_dir import StateInUse, StateUnusable, claim
from supervision.status import serve_status
from supervision.unit import Exit, Unit
from supervision.worker import Worker

__all__ = ["StateInUse", "StateUnusable", "build", "supervise"]

_LAST_LOOKS = 1.0
_LOOK = 0.01
"""Seconds for which, and between which, the end looks for orphans that were killed and are not reaped yet."""


def build(spec: SupervisorSpec, launcher: Launcher, roster: Roster, rng: random.Random) -> Group:
    """Return the tree of units that `spec` describes. `ValueError` names a child whose name is taken."""
    units: list[Unit] = []
    for child in spec.children:
        if isinstance(child, ChildSpec):
            roster.enlist(child.name)
            units.append(Worker(child, launcher, roster))
        else:
            units.append(build(child, launcher, roster, rng))
    return Group(spec, units, rng)


def leaves(spec: SupervisorSpec) -> Iterator[ChildSpec]:
    """Yield every child of the tree, in its order."""
    for child in spec.children:
        if isinstance(child, ChildSpec):
            yield child
        else:
            yield from leaves(child)


async def supervise(
    spec: SupervisorSpec, state_dir: Path, *, on_ready: Callable[[], None] | None = None
) -> int:
    """Run a tree of processes until SIGTERM or SIGINT, or until its failure escalates to the root.

    `on_ready` is called once, when the whole tree is up. Returns the exit code: 0 after an orderly stop,
    1 after an escalation, whose reason is then the last line on stderr. A second signal while it drains
    kills what is left.

    Raises `StateInUse` when another supervisor runs on `state_dir`, `StateUnusable` when it cannot be
    written to. Cancellation: every child is killed and reaped.
    """
    with claim(state_dir) as epochs:
        prctl.adopt_orphans()
        launcher = ProcessLauncher(state_dir)
        roster = Roster(epochs.next)
        root = build(spec, launcher, roster, random.Random())  # noqa: S311 - jitter
        launcher.templates.warm(leaves(spec))
        end = await _run(root, roster, launcher, state_dir, on_ready or (lambda: None))
    if end.failed:
        sys.stderr.write(f"the tree failed: {end.reason}\n")
        sys.stderr.flush()
    return 1 if end.failed else 0


async def _run(
    root: Group, roster: Roster, launcher: ProcessLauncher, state_dir: Path, on_ready: Callable[[], None]
) -> Exit:
    end = Exit(failed=False, reason="killed while it drained")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_status, roster, state_dir)
        nursery.start_soon(_reap, launcher)
        try:
            with trio.CancelScope() as scope:
                nursery.start_soon(_obey_signals, root, scope)
                end = await root.live(on_ready)
        finally:
            launcher.templates.dismiss()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_LOOKS):
                await _reap_all(launcher)
        nursery.cancel_scope.cancel()
    return end


async def _obey_signals(root: Group, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        root.stop()
        await anext(signals)
        scope.cancel()


async def _reap(launcher: ProcessLauncher) -> None:
    with trio.open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            launcher.look_after_orphans()


async def _reap_all(launcher: ProcessLauncher) -> None:
    while launcher.look_after_orphans():  # noqa: ASYNC110 - the kernel has no event for it
        await trio.sleep(_LOOK)
