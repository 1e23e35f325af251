"""What incarnations are forked from: it must have one thread when it is asked to fork, whatever it prepared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.batcher import Batcher, BatcherSettings, _state_the_pool
from scripts.model import DEFAULT, models_directory

PREPARE = """
import os, sys
from supervision import control, template
template.prepare(control.Pattern(sys.argv[1], eval(sys.argv[2])))
print(len(os.listdir("/proc/self/task")))
"""
MODEL = models_directory() / DEFAULT.file_name
ACTORS = {
    "actors.ledger:Ledger": {},
    "actors.limiter:Limiter": {},
    "actors.safety:Safety": {},
    "actors.router:Router": {"models": ("m",)},
    "actors.fast_answer:FastAnswer": {"release_root": "releases"},
    "actors.edge.actor:Edge": {"models": (), "accounts": ""},
    "actors.session:Session": {"models": {"m": str(MODEL)}},
    "actors.batcher:Batcher": {"model": str(MODEL), "name": "m"},
}


@pytest.mark.slow
@pytest.mark.parametrize("actor", ACTORS)
def test_a_prepared_actor_has_left_no_thread(actor):
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, actor, repr(ACTORS[actor])],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"


@pytest.mark.slow
@pytest.mark.model
def test_a_batcher_says_how_large_its_pool_is_and_what_fits(caplog):
    caplog.set_level("INFO")
    engine = Batcher(BatcherSettings(str(MODEL), "m", threads=1, kv_bytes=64 << 20)).make_engine()
    _state_the_pool("m", engine)
    engine.close()
    blocks = (64 << 20) // engine.model.kernels.block_bytes
    assert f"m: the KV pool has {blocks} blocks of 16 tokens, 6" in caplog.text
    assert f"a request has at most {16 * blocks} tokens" in caplog.text
