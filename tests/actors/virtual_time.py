"""Coroutines on trio's virtual clock, which jumps whenever every task waits.

It does not see threads: while one worked, hours would pass. So what would run in a thread runs in the loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import trio
import trio.testing


async def _in_the_loop(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` to its end."""
    with patch.object(trio.to_thread, "run_sync", _in_the_loop):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
