"""What one process has compiled and packed, the next one finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.cache import cache_directory

ROOT = Path(__file__).parents[2]
START = """
import json, sys
import numba
from numba.core import compiler

compiled, compile_extra = [], compiler.compile_extra

def counted(typing, target, function, *arguments, **more):
    compiled.append(function.__qualname__)
    return compile_extra(typing, target, function, *arguments, **more)

compiler.compile_extra = counted

from gpu.engine import Engine
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request

engine = Engine.load(sys.argv[1], kv_bytes=1 << 20, max_batch=2, token_budget=32, threads=1)
engine.add(Request("one", (1, 2, 3), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
while engine.has_work:
    engine.step()
engine.close()
by_the_engine = list(compiled)

def not_kept():
    pass

numba.cfunc("void()")(not_kept)
print(json.dumps([by_the_engine, compiled[len(by_the_engine):]]))
"""


def _start(model, cache):
    """What a new process compiled: for the engine, and then to show that it would have been seen."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(model)],
        env={**os.environ, "ANTIPHON_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_start_compiles_and_packs_nothing(tiny, tmp_path):
    kernels = cache_directory() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(
        kernels
    )  # as the other tests: compiled kernels stay where they are kept
    _start(tiny, tmp_path)
    (tiles,) = (tmp_path / "tiles").iterdir()
    packed = tiles.stat()
    by_the_engine, seen = _start(tiny, tmp_path)
    assert (by_the_engine, seen) == ([], ["not_kept"])
    (tiles,) = (tmp_path / "tiles").iterdir()
    assert (tiles.stat().st_ino, tiles.stat().st_mtime_ns) == (packed.st_ino, packed.st_mtime_ns)
