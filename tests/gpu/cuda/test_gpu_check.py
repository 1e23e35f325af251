"""What `scripts/gpu_check` can be held to without a GPU."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gpu.kernels.cuda import Limits
from gpu.model_config import ModelConfig
from scripts import gpu_check
from scripts.bench import report
from scripts.gpu_limits import Limits as CardLimits
from scripts.gpu_speed import EIGHT_B, decoding_step, make_up, measure, operations, prefill_step, time_outside
from tests.gpu.cuda.arrays import bf16
from tests.gpu.cuda.shim_device import ShimDevice
from tests.gpu.cuda.test_cuda_kernels import MODULES

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU here")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run([ROOT / "scripts" / "gpu_check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no NVIDIA GPU" in done.stderr


@pytest.mark.parametrize(
    ("summary", "passed", "failed"),
    [
        ("3 failed, 40 passed, 2 errors in 5.21s", 40, 5),
        ("noise: 9 passed\n== 41 passed, 2 skipped in 61.20s (0:01:01) ==\na warning", 41, 0),
        ("No module named pytest", 0, 0),
    ],
)
def test_reads_how_many_kernel_tests_passed_and_failed(monkeypatch, summary, passed, failed):
    monkeypatch.setattr(gpu_check, "_run", lambda _command: summary)
    assert [row.value for row in gpu_check._kernel_tests()] == [passed, failed]
    assert report.exit_code(gpu_check._kernel_tests()) == int(passed == 0 or failed > 0)


@pytest.mark.compiler
def test_measures_a_made_up_model(random):
    config = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 64, 256, 1e-5, 1e4, "halves")

    def fill(rows, columns):
        return bf16(random.standard_normal((rows, columns)) / 64)

    model = make_up(config, ShimDevice(MODULES), Limits(40, 2, 64), fill, 5)
    for batch in (decoding_step(2, 33, 5), prefill_step(40, 5)):
        speed = measure(model, batch, rounds=1)
        assert speed.in_all > 0
        assert speed.on_card == 2.0  # what the device's clock, which the test turns, says
        assert speed.bytes_moved > 2 * 2 * 64 * 4 * 32
        assert speed.operations == operations(config, batch)


@pytest.mark.compiler
def test_what_a_step_costs_beside_the_device_is_measured_through_the_engine(random, monkeypatch):
    config = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 64, 256, 1e-5, 1e4, "halves")

    def fill(rows, columns):
        return bf16(random.standard_normal((rows, columns)) / 64)

    device = ShimDevice(MODULES)
    model = make_up(config, device, Limits(64, 8, 64), fill, 5)
    slow = iter([0.0] * 2 + [-1000.0] * 6 + [0.0] * 99)  # forward and sampling, by the device's clock
    monkeypatch.setattr(ShimDevice, "seconds", lambda *_: next(slow))
    outside = time_outside(model, 5, context=33, steps=4)
    assert (
        2000 <= outside < 3000
    )  # the prompt's step is left out, the others are 2,000 s longer than they were
    assert device.replays >= 2
    monkeypatch.setattr(ShimDevice, "copy_out", lambda _self, to, _array: to.fill(-1))
    with pytest.raises(RuntimeError, match="finite"):
        time_outside(model, 5, context=33, steps=4)


def test_operations_of_an_8b_shaped_step_are_two_for_each_weight_and_token():
    weights = 6_979_321_856 + 128256 * 4096
    attention = 4 * 32 * 4096 * 512
    assert operations(EIGHT_B, decoding_step(1, 512, 999)) == 2 * weights + attention


def test_blocks_wrap_round_a_small_cache():
    batch = decoding_step(3, 100, 4)
    assert batch.tables.shape == (3, 7)
    assert batch.tables.max() < 4
    assert (batch.slots == batch.tables[:, -1] * 16 + 3).all()
    assert (np.diff(prefill_step(50, 3).positions) == 1).all()


def test_the_limit_is_the_longer_of_moving_and_computing():
    limits = CardLimits(bandwidth=10.0, matrix_rate=100.0)
    assert limits.seconds(20, 100) == 2
    assert limits.seconds(20, 500) == 5
