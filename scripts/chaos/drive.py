"""One chaos run: on a tree of its own, or against one that runs already."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from scripts import credentials
from scripts.chaos import plan as plans
from scripts.chaos.clients import Door
from scripts.chaos.inject import Tree
from scripts.chaos.plan import Plan
from scripts.chaos.report import Progress
from scripts.chaos.runner import OWNERS, Runner, left_over
from scripts.failure import UsageFault
from store.accounts import Accounts
from supervision.status import NotRunning, read_status

START_LIMIT = 120.0
SMALL_DISK_MIB = 64


def run(args: argparse.Namespace) -> int:
    """Run a plan. Exit code 0 only if every planned fault fired and no invariant broke."""
    plan = plans.load(args.plan)
    seed = args.seed or random.SystemRandom().randrange(1, 1 << 31)
    if args.state:
        progress = _against(plan, seed, Path(args.state).resolve(), None, args.json)
    else:
        with tempfile.TemporaryDirectory(prefix="antiphon-chaos-") as scratch:
            own = OwnTree(Path(scratch) / "var", plan, args.model)
            with _disk_of(plan, own.state):
                own.start()
                try:
                    progress = _against(plan, seed, own.state, own, args.json)
                finally:
                    own.stop()
                progress.violations += left_over(own.state)
    print(progress.as_json()) if args.json else progress.print(Console())
    return 0 if progress.good else 1


@contextlib.contextmanager
def _disk_of(plan: Plan, state: Path) -> Iterator[None]:
    """Give the state a small file system of its own when the plan fills the disk. Raises `UsageFault`."""
    if not any(fault.kind == "disk_full" for fault in plan.faults):
        yield
        return
    state.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "antiphon-chaos", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageFault(
            f"plan {plan.name} fills a disk of its own, and mounting one failed: {done.stderr.strip()}"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(state)], check=False)


class OwnTree:
    """A tree that belongs to the run: started, killed and started again by it."""

    def __init__(self, state: Path, plan: Plan, model: str) -> None:
        self.state = state
        self.command = [sys.executable, "-m", "scripts.cli", "serve", "--state", str(state), "--port", "0"]
        self.command += ["--model", model] if model else []
        for key, value in plan.serve.items():
            self.command += [f"--{key.replace('_', '-')}", value]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until every actor is up. Restarted, it keeps the port its clients know."""
        if (self.state / "credentials").exists():
            port = credentials.read(self.state).base_url.rsplit(":", 1)[1].split("/")[0]
            self.command[self.command.index("--port") + 1] = port
        self.state.mkdir(parents=True, exist_ok=True)
        log = (self.state / "serve.log").open("ab")
        self.process = subprocess.Popen(
            self.command, stdout=log, stderr=log, env={**os.environ, "ANTIPHON_CHAOS": "1"}
        )
        log.close()
        _await_up(self.state, self.process)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self.process.pid if self.process is not None else 0

    def restart(self) -> None:
        """Reap the killed supervisor and start again."""
        if self.process is not None:
            self.process.wait()
        self.start()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not end it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _await_up(state: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end:
        if process.poll() is not None:
            tail = (
                (state / "serve.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            )
            raise UsageFault(f"the tree did not start: {' '.join(tail)}")
        try:
            actors = read_status(state)
            if actors and all(a.state == "up" for a in actors) and credentials.path_of(state).exists():
                return
        except (NotRunning, OSError):
            pass
        time.sleep(0.05)
    raise UsageFault(f"the tree was not up within {START_LIMIT:.0f} s")


def _against(plan: Plan, seed: int, state: Path, own: OwnTree | None, as_json: bool) -> Progress:
    root = credentials.read(state).base_url.removesuffix("/v1")
    tree = Tree(state, lambda: own.pid if own else 0, own.restart if own else _cannot_restart)
    runner = Runner(plan, seed, tree, Door(root, _keys(state)))
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        return runner.run()
    with Live(get_renderable=runner.progress.live, console=console, refresh_per_second=4):
        return runner.run()


def _cannot_restart() -> None:
    raise UsageFault("this plan kills the supervisor: run it on a tree of its own, without --state")


def _keys(state: Path) -> tuple[str, ...]:
    accounts = Accounts(state / "accounts.sqlite")
    try:
        return tuple(accounts.create_key(f"chaos-{owner}", "chaos")[1] for owner in range(OWNERS))
    finally:
        accounts.close()
