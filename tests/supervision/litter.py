"""Actors for the tests with real processes."""

import os
import signal
import subprocess
from typing import Any, ClassVar

from attrs import frozen

from supervision.actor import Actor
from supervision.errors import ActorDown
from tests.supervision.echo import Hold, Say


class Litterer(Actor):
    """Leaves two sleepers behind: a child, and a grandchild whose parent is gone."""

    @frozen
    class Settings:
        """None."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    async def on_start(self) -> None:
        self._litter()

    def _litter(self) -> None:
        child = subprocess.Popen(["sleep", "300"])
        shell = subprocess.run(["sh", "-c", "sleep 300 >&- 2>&- & echo $!"], capture_output=True, check=True)
        pids = f"{child.pid} {int(shell.stdout)}"
        (self.context.state_dir / "litter").write_text(pids)


class Caller(Actor):
    """Asks `a`, then waits for an answer that does not come."""

    @frozen
    class Settings:
        """None."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    async def on_start(self) -> None:
        self.context.nursery.start_soon(self._call)

    async def _call(self) -> None:
        said = await self.context.ask("a", Say("hello"), timeout=60)
        (self.context.state_dir / "answered").write_text(said.text)
        try:
            await self.context.ask("a", Hold(1), timeout=60)
        except ActorDown:
            (self.context.state_dir / "failed").write_text("ActorDown")


class Prepared(Actor):
    """Writes down, at each start, which process prepared it."""

    made_by: ClassVar[int] = 0

    @frozen
    class Settings:
        """None."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def prepare(cls, settings: Any) -> None:
        cls.made_by = os.getpid()

    async def on_start(self) -> None:
        with (self.context.state_dir / "made_by").open("a") as file:
            file.write(f"{self.made_by}\n")


class Slow(Prepared):
    """Is never done preparing."""

    @classmethod
    def prepare(cls, settings: Any) -> None:
        signal.pause()
