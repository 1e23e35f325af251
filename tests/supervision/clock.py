"""Runs an async test under trio, on a virtual clock that jumps to the next deadline when all is quiet."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(functools.partial(test, *args, **kwargs), clock=clock)

    return run
