"""One process, one thread, one seed: what a simulated tree does depends on nothing else.

Time is virtual, trio's scheduling is drawn from the seed, and what would run in a thread runs in the loop, at
an instant drawn from the seed. Actors run unchanged: what they call (`trio.to_thread.run_sync`, `time.time`,
`secrets.randbits`, `uuid4`) is replaced where it is looked up.

Sets of strings are the one thing out of reach: their order is the interpreter's hash seed. `python -m
tests.simulation.run` starts itself again with `PYTHONHASHSEED=0`, and so does `replay`.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from uuid import UUID

import trio
import trio.testing

_EPOCH = 1_790_000_000.0
"""Unix seconds at which every simulation begins."""
_THREAD_TAKES = 0.004
"""Virtual seconds that a call in a thread takes at most, before and after its work."""

ThreadHook = Callable[[], None]
"""Called just before and just after the work of a simulated thread."""


def run_seeded(seed: int, main: Callable[[], Awaitable[None]], at_thread: ThreadHook) -> None:
    """Run `main` to its end as the one thing the seed says."""
    run = trio._core._run
    clock = trio.testing.MockClock(autojump_threshold=0)
    rng = random.Random(f"{seed}/world")
    with ExitStack() as stack:
        for target, name, value in (
            (run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            (run, "_r", random.Random(f"{seed}/schedule")),
            (time, "time", lambda: _EPOCH + clock.current_time()),
            (time, "time_ns", lambda: round((_EPOCH + clock.current_time()) * 1e9)),
            (secrets, "randbits", rng.getrandbits),
            (trio.to_thread, "run_sync", _threads(random.Random(f"{seed}/threads"), at_thread)),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch("actors.edge.turns.uuid4", lambda: UUID(int=rng.getrandbits(128))))
        gc.disable()
        try:
            trio.run(main, clock=clock)
        finally:
            gc.enable()


def _threads(rng: random.Random, at_thread: ThreadHook) -> Callable[..., Awaitable[Any]]:
    """Return a `trio.to_thread.run_sync` that works in the loop.

    A killed process takes its threads with it: cancelled before the work, the work is not done; cancelled
    after it, it is done and nobody hears of it.
    """

    async def run_sync(sync_fn: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.sleep(rng.uniform(0, _THREAD_TAKES))
        at_thread()
        await trio.lowlevel.checkpoint()
        result = sync_fn(*args)
        at_thread()
        await trio.sleep(rng.uniform(0, _THREAD_TAKES))
        return result

    return run_sync


def with_fixed_hashes(module: str) -> None:
    """Start this program again with the order of sets fixed, if it is not."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])  # noqa: S606 - this very program
