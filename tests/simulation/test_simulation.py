"""Thousands of storms, each from a seed: every promise is kept, and a planted bug is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import planted

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("ANTIPHON_SIMULATION_SEEDS", "2000"))
"""Seeds of the slow test: under four minutes on two cores."""
FIRST = int(os.environ.get("ANTIPHON_SIMULATION_FIRST", "0"))
WORKERS = 2
FIND_WITHIN = 200
"""A planted bug is found within so many seeds."""
REGRESSIONS = (2117, 4036, 5027, 6044, 6121, 100098)
"""Seeds that once broke a promise."""


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.simulation.run", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _outcomes(*workers: subprocess.Popen[str]) -> list[dict[str, Any]]:
    outcomes = []
    try:
        for worker in workers:
            said, _ = worker.communicate()
            assert worker.returncode == 0, f"a worker ended with {worker.returncode}"
            outcomes += [json.loads(line) for line in said.splitlines()]
    finally:
        for worker in workers:
            worker.kill()
    return outcomes


def _broken(outcomes: Sequence[dict[str, Any]]) -> str:
    lines = [f"seed {o['seed']}: {what}" for o in outcomes for what in o["violations"]]
    return "\n".join([*lines, "replay one with: python -m tests.simulation.replay SEED"]) if lines else ""


@pytest.mark.slow
def test_no_storm_breaks_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    workers = [_start(f"{FIRST + n}:{FIRST + SEEDS}:{WORKERS}") for n in range(WORKERS)]
    outcomes = _outcomes(*workers)
    took = time.monotonic() - began
    assert sorted(o["seed"] for o in outcomes) == list(range(FIRST, FIRST + SEEDS))
    assert not _broken(outcomes), _broken(outcomes)
    faults = sum(o.get("kills", 0) for o in outcomes)
    with capsys.disabled():
        sys.stdout.write(f"\n{SEEDS} simulated storms, {faults} kills, {SEEDS / took:.1f} seeds/s\n")
    assert faults >= SEEDS, "too few kills for a storm"


@pytest.mark.parametrize("bug", sorted(planted.BUGS))
@pytest.mark.slow
def test_a_planted_bug_is_found(bug: str) -> None:
    outcomes = _outcomes(_start(f"0:{FIND_WITHIN}", "--plant", bug))
    assert _broken(outcomes), f"{bug} was not found in {FIND_WITHIN} seeds"


@pytest.mark.slow
def test_a_seed_is_the_same_run_every_time() -> None:
    alone = _outcomes(_start("5"))
    after_others = _outcomes(_start("3:6"))
    assert alone[0] == after_others[-1]
    assert alone[0]["digest"] != after_others[0]["digest"]


@pytest.mark.slow
def test_seeds_that_once_failed_do_so_no_more() -> None:
    outcomes = _outcomes(_start(*map(str, REGRESSIONS)))
    assert len(outcomes) == len(REGRESSIONS)
    assert not _broken(outcomes), _broken(outcomes)
