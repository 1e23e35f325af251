"""The GPU a batcher runs on: pinned before CUDA is there, and what became of it said in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import trio
from attrs import frozen

from gpu.errors import EngineError
from gpu.kernels.cuda_cards import VISIBLE, list_cards
from supervision.errors import CannotGoOn

RETRY_AFTER = 30.0
"""Seconds between two tries to load while others serve: a card that is gone must not use up the group's restarts."""

T = TypeVar("T")


@frozen
class Seat:
    """One card, by its UUID; `name` is for people."""

    uuid: str
    name: str

    async def load(self, make: Callable[[], T], *, others_serve: bool) -> T:
        """Return what `make` makes, in a thread, with this card the only one that the process can see.

        Raises `CannotGoOn`: at once when the tree is only starting, so that whoever started it hears of it; else
        after `RETRY_AFTER`, and the next incarnation tries again. Cancellation: as of a thread's call, at its end.
        """
        os.environ[VISIBLE] = self.uuid
        try:
            return await trio.to_thread.run_sync(make)
        except EngineError as error:
            words = await self.obituary(error)
            if others_serve:
                await trio.sleep(RETRY_AFTER)
            raise CannotGoOn(words) from error

    async def obituary(self, error: EngineError) -> str:
        """Say what happened to the card, as `nvidia-smi` sees it now."""
        listed = await trio.to_thread.run_sync(list_cards, {}, abandon_on_cancel=True)
        card = f"{self.name} ({self.uuid})"
        if self.uuid in [found.uuid for found in listed]:
            return f"{card}: {error}"
        return (
            f"{card} fell off the bus: nvidia-smi lists it no more. Reset it or restart the machine; "
            f"this batcher comes back with it ({error})"
        )
