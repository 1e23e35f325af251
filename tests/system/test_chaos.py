"""`antiphon chaos` on the real tree with the real model. Recovery times (invariant G) are figures, not tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.usefixtures("model_file")]

SMALL = """
turns = 16
concurrency = 4
max_tokens = 24
disconnects = 0.2
abandon = 0.1
hostile = 0.2
pace = 1.0

[[faults]]
kind = "kill"
count = {kills}
targets = ["batcher", "session", "edge", "safety", "limiter", "ledger"]

[[faults]]
kind = "{other}"
count = 1
seconds = 1.0
targets = ["session"]
frames = ["drop", "delay", "duplicate", "reorder", "truncate"]
"""


def chaos(plan: Path, seed: int) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "chaos", "--plan", str(plan), "--seed", str(seed), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("other", "kills"),
    [("kill_supervisor", 6), ("frames", 1), ("spin", 1), ("clock_step", 0), ("slow_disk", 0), ("poison", 0)],
)
def test_every_fault_fires_and_no_invariant_breaks(tmp_path, other, kills):
    plan = tmp_path / "small.toml"
    plan.write_text(SMALL.format(other=other, kills=kills))
    report = chaos(plan, seed=7)
    assert report["faults"]["not_fired"] == []
    assert len(report["faults"]["fired"]) == report["faults"]["planned"]
    assert report["turns"]["ran"] >= 16
    assert [v for v in report["violations"] if v["invariant"] != "G"] == []
