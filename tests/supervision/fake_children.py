"""Children without processes: a launcher whose incarnations do what a script says, on trio's clock."""

from collections.abc import Callable, Iterable

import trio
import trio.testing
from attrs import define, field

from supervision.child import Incarnation, Launcher, LaunchFailed
from supervision.control import Beat, Dying, Ready, Report
from supervision.spec import ChildSpec
from supervision.tree import Tree

Life = Callable[["FakeIncarnation"], "trio.abc.Awaitable[int]"]


@define(eq=False)
class FakeIncarnation(Incarnation):
    """Lives until it is told or made to end. `life` is a coroutine that returns its exit status."""

    name: str
    pid: int
    epoch: int
    trees: list[Tree] = field(factory=list)
    signals: list[str] = field(factory=list)
    status: int | None = None
    closed: bool = False
    obeys_sigterm: bool = True
    _reports: list[Report] = field(factory=list)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _ended: trio.Event = field(factory=trio.Event)

    def say(self, report: Report) -> None:
        self._reports.append(report)
        self._news.unpark_all()

    def end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self._ended.set()

    async def report(self) -> Report:
        while not self._reports:
            await self._news.park()
        return self._reports.pop(0)

    def reports_so_far(self) -> list[Report]:
        taken, self._reports = self._reports, []
        return taken

    async def exit_status(self) -> int:
        await self._ended.wait()
        assert self.status is not None
        return self.status

    def push(self, tree: Tree) -> None:
        assert not self.closed
        self.trees.append(tree)

    def terminate(self) -> None:
        self.signals.append("TERM")
        if self.obeys_sigterm:
            self.end(0)

    def kill(self) -> None:
        self.signals.append("KILL")
        self.end(-9)

    def close(self) -> None:
        self.closed = True


class FakeLauncher(Launcher):
    """Launches incarnations that are ready after `takes` seconds and beat every second.

    `lives` maps a child's name to what each of its runs does, in order: a number is the exit status it
    ends with before it is ready, "mute" says nothing at all, "deaf" ignores SIGTERM, "no launch" cannot
    be spawned, "unborn" is never done being launched, "well" (also when the script is over) is as above.
    """

    def __init__(self, nursery: trio.Nursery, lives: dict[str, Iterable[int | str]] | None = None) -> None:
        self._nursery = nursery
        self._lives = {name: iter(runs) for name, runs in (lives or {}).items()}
        self.takes = 0.1
        self.runs: list[FakeIncarnation] = []
        self.started: list[tuple[float, str]] = []

    def now(self, name: str) -> FakeIncarnation:
        """The newest incarnation of `name`."""
        return next(run for run in reversed(self.runs) if run.name == name)

    def alive(self) -> list[str]:
        return [run.name for run in self.runs if run.status is None]

    async def launch(self, spec: ChildSpec, epoch: int, tree: Tree) -> Incarnation:
        await trio.lowlevel.checkpoint()
        life = next(self._lives.get(spec.name, iter(())), "well")
        self.started.append((trio.current_time(), spec.name))
        if life == "no launch":
            raise LaunchFailed("no such program")
        if life == "unborn":
            await trio.sleep_forever()
        run = FakeIncarnation(spec.name, pid=len(self.runs) + 100, epoch=epoch)
        run.obeys_sigterm = life != "deaf"
        self.runs.append(run)
        self._nursery.start_soon(self._live, run, life)
        return run

    async def _live(self, run: FakeIncarnation, life: int | str) -> None:
        await trio.sleep(self.takes)
        if isinstance(life, int):
            run.say(Dying(f"ended with {life}"))
            run.end(life)
            return
        if life != "mute":
            run.say(Ready())
        while run.status is None and life != "mute":
            run.say(Beat(progress=0, busy=False, depth=0))
            await trio.sleep(1.0)
