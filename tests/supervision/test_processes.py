"""The supervisor with real processes. Slow: each test starts some."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervision.status import ActorStatus, NotRunning, read_status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 60.0
"""Seconds a test waits for what should take one or two: the machine may be busy."""

RUN = """
import sys, trio, json
from pathlib import Path
from supervision import wire
from supervision.spec import SupervisorSpec, ChildSpec
from supervision.supervisor import supervise, StateInUse
data = json.loads(sys.argv[2])
children = tuple(ChildSpec(**child) for child in data.pop("children"))
try:
    code = trio.run(lambda: supervise(SupervisorSpec(children=children, **data), Path(sys.argv[1]),
                    on_ready=lambda: print("ready", flush=True)))
except StateInUse as error:
    sys.exit(f"in use: {error}")
sys.exit(code)
"""

ECHO = "tests.supervision.echo:Echo"


class Supervisor:
    """A supervisor process on a state directory of its own."""

    def __init__(self, state: Path, *children: dict[str, Any], **fields: Any) -> None:
        self.state = state
        data = {"name": "root", "strategy": "one_for_one", "children": children, **fields}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(state), json.dumps(data)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def actor(self, name: str) -> ActorStatus:
        return next(actor for actor in read_status(self.state) if actor.name == name)

    def up_again(self, dead: ActorStatus) -> ActorStatus:
        """Wait for the incarnation after this one; the status it was seen up in. One reading decides."""
        seen = dead

        def up() -> bool:
            nonlocal seen
            seen = self.actor(dead.name)
            return seen.state == "up" and seen.epoch > dead.epoch

        until(up)
        return seen

    def end(self, *, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> tuple[int, str]:
        for number in signals:
            self.process.send_signal(number)
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err


def until(fact: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < limit, "it never became so"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.fixture
def supervisor(tmp_path):
    started: list[Supervisor] = []

    def start(*children: dict[str, Any], **fields: Any) -> Supervisor:
        started.append(Supervisor(fields.pop("state", tmp_path), *children, **fields))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate(timeout=PATIENCE)


def child(name: str, actor: str = ECHO, **fields: Any) -> dict[str, Any]:
    return {"name": name, "actor": actor, **fields}


def test_sigterm_stops_everything_and_leaves_nothing(supervisor, tmp_path):
    it = supervisor(child("a"), child("b"))
    it.wait_ready()
    pids = [actor.pid for actor in read_status(tmp_path)]
    assert [actor.state for actor in read_status(tmp_path)] == ["up", "up"]
    assert all(actor.rss_mib > 5 for actor in read_status(tmp_path))
    assert it.end() == (0, "")
    assert not any(alive(pid) for pid in pids)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch"]
    with pytest.raises(NotRunning):
        read_status(tmp_path)
    for name in ("a", "b"):
        last = json.loads((tmp_path / "logs" / f"{name}.log").read_text().splitlines()[-1])
        assert (last["actor"], last["event"]) == (name, "actor stopped")


def test_a_killed_actor_comes_back_with_a_higher_epoch_and_a_stopped_one_is_healed(supervisor):
    it = supervisor(child("a"), child("b"))
    it.wait_ready()
    first = it.actor("a")
    os.kill(first.pid, signal.SIGKILL)
    second = it.up_again(first)
    assert (second.restarts, second.last_error) == (1, "killed by SIGKILL")
    os.kill(second.pid, signal.SIGSTOP)
    assert it.up_again(second).last_error.startswith("no heartbeat for")
    assert it.actor("b").restarts == 0
    assert not alive(second.pid)
    assert it.end()[0] == 0


def test_a_crash_at_start_escalates_to_a_non_zero_exit_with_the_reason_last(supervisor, tmp_path):
    it = supervisor(
        child("a"), child("b", settings={"colour": 1}), intensity=1, window=PATIENCE, backoff=0.01
    )
    _, err = it.process.communicate(timeout=PATIENCE)
    assert it.process.returncode == 1
    last = err.splitlines()[-1]
    assert "b: BadActor" in last
    assert "unknown field 'colour' in Settings" in last
    assert "more than 1 restarts of root" in last
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch"]


def test_children_die_with_their_supervisor_and_epochs_go_on_rising(supervisor):
    it = supervisor(child("a"), child("b"))
    it.wait_ready()
    pids = [actor.pid for actor in read_status(it.state)]
    highest = max(actor.epoch for actor in read_status(it.state))
    it.process.kill()
    until(lambda: not any(alive(pid) for pid in pids))
    again = supervisor(child("a"))
    again.wait_ready()
    assert again.actor("a").epoch > highest
    assert again.end()[0] == 0


def test_a_second_supervisor_on_the_same_state_is_refused(supervisor):
    it = supervisor(child("a"))
    it.wait_ready()
    second = supervisor(child("a"))
    _, err = second.process.communicate(timeout=PATIENCE)
    assert second.process.returncode == 1
    assert "in use: another supervisor runs on" in err
    assert it.actor("a").state == "up"


def test_what_a_killed_actor_leaves_behind_is_ended_and_reaped(supervisor, tmp_path):
    it = supervisor(child("a", "tests.supervision.litter:Litterer"))
    it.wait_ready()
    litter = [int(pid) for pid in (tmp_path / "litter").read_text().split()]
    assert len(litter) == 2
    assert all(alive(pid) for pid in litter)
    os.kill(it.actor("a").pid, signal.SIGKILL)
    until(lambda: not any((Path("/proc") / str(pid)).exists() for pid in litter))
    assert it.end()[0] == 0


def test_actors_talk_over_real_sockets_and_hear_of_a_death_in_milliseconds(supervisor, tmp_path):
    it = supervisor(child("a"), child("b", "tests.supervision.litter:Caller"))
    it.wait_ready()
    until((tmp_path / "answered").exists)
    began = time.monotonic()
    os.kill(it.actor("a").pid, signal.SIGKILL)
    until((tmp_path / "failed").exists)
    assert (tmp_path / "failed").read_text() == "ActorDown"
    assert time.monotonic() - began < 10, "the ask's own deadline is a minute"
    assert it.end()[0] == 0


def children_of(pid: int) -> set[int]:
    return {
        int(child)
        for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    }


def test_children_of_one_kind_are_forked_from_one_template_and_a_dead_template_is_replaced(supervisor):
    it = supervisor(child("a"), child("b"))
    it.wait_ready()
    a, b = it.actor("a"), it.actor("b")
    (template,) = children_of(it.process.pid) - {a.pid, b.pid}
    os.kill(a.pid, signal.SIGKILL)
    a = it.up_again(a)
    assert alive(template)
    os.kill(template, signal.SIGKILL)
    until(lambda: not alive(template))
    assert alive(a.pid)
    assert alive(b.pid)
    os.kill(b.pid, signal.SIGKILL)
    assert it.up_again(b).restarts <= 2
    left = children_of(it.process.pid)
    assert len(left) == 3
    assert it.end() == (0, "")
    assert not any(alive(pid) for pid in left)


def test_what_an_actor_prepares_is_there_in_every_incarnation_and_is_made_once(supervisor, tmp_path):
    it = supervisor(child("a", "tests.supervision.litter:Prepared"))
    it.wait_ready()
    os.kill(it.actor("a").pid, signal.SIGKILL)
    until(lambda: len((tmp_path / "made_by").read_text().split()) == 2)
    first, second = (tmp_path / "made_by").read_text().split()
    assert first == second
    assert int(first) in children_of(it.process.pid)
    assert it.end() == (0, "")


def test_a_stop_ends_a_start_whose_template_still_prepares(supervisor, tmp_path):
    it = supervisor(child("a", "tests.supervision.litter:Slow"))
    until((tmp_path / "run" / "supervisor.sock").exists)
    until(lambda: it.actor("a").state == "starting")
    assert it.end() == (0, "")
