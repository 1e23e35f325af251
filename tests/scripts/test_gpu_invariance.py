"""The part of `gpu_check` that holds replies against each other: it passes over what keeps its promise, and only then."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from gpu.blocks import BlockPool
from gpu.engine import Engine
from gpu.errors import GpuFull
from gpu.kernels import host
from gpu.llama import Llama
from gpu.model_config import ModelConfig
from gpu.scheduler import Scheduler
from scripts import gpu_golden, gpu_invariance
from scripts.bench import report
from scripts.gpu_invariance import HISTORIES, Sizes, Trial, invariance_rows, made_up_rows
from scripts.gpu_speed import ShapeOnly
from tests.gpu.cuda.cpu_device import COMPILER
from tests.gpu.cuda.shim_device import Graph, ShimDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))  # as the engine's own tests do
import tiny_models
from plain_kernels import PlainKernels

CONFIG = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 67, 256, 1e-5, 1e4, "halves")
SIZES = Sizes(rows=48, sequences=10, blocks=80, prompts=(1, 17, 35, 40), reply=18, few=3)
MODULES = {}
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no g++ here: the CUDA text cannot be run on the CPU"
)


class Weights:
    """Random ones of `CONFIG`'s shape."""

    config = CONFIG

    def __init__(self):
        self.random = np.random.default_rng(3)
        self.known = {}

    def has(self, name):
        return not name.endswith("bias") and "q_norm" not in name and "rope" not in name

    def floats(self, name):
        if "norm" in name:
            return np.ones(CONFIG.width, np.float32)
        if name not in self.known:
            shape = ShapeOnly(CONFIG).shape(name)
            weights = self.random.standard_normal(shape) * (2 / np.sqrt(shape[1]))
            self.known[name] = weights.astype(np.float32)
        return self.known[name]


class Overlapping(PlainKernels):
    """Computes a step when it is finished, as a device does that nothing waits for."""

    overlaps = True

    def finish(self, pending):
        return super().start(*pending)

    def start(self, program, batch):
        return program, batch


def plain(kernels=PlainKernels):
    source = Weights()
    made = kernels(source, CONFIG.context_length)
    model = Llama(source, made)
    made.allocate_cache(SIZES.blocks)
    return model


def by_history(rows):
    return {row.name.split(", ")[1]: row for row in rows}


def failing(rows):
    """The histories whose rows would make `gpu_check` fail."""
    missed = [row.name for row in rows if row.reaches(row.floor) is False or row.note.startswith("failed")]
    return {name.split(", ")[1] for name in missed}


@pytest.mark.parametrize("kernels", [PlainKernels, Overlapping])
def test_passes_over_kernels_that_keep_the_promise(kernels):
    rows = invariance_rows("model", plain(kernels), SIZES)
    assert failing(rows) == set()
    assert rows[0].value > 0.9
    assert [row.value for row in rows[1:]] == [0] * len(HISTORIES)
    assert report.exit_code(rows) == 0


@pytest.mark.slow
def test_passes_over_the_processors_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "cache_directory", lambda: tmp_path)
    file = tiny_models.write_gguf(tmp_path / "tiny.gguf", tiny_models.random_weights(), "Q4_0")
    engine = Engine.load(
        file, max_batch=SIZES.sequences, token_budget=SIZES.rows, kv_bytes=8 << 20, threads=1
    )
    rows = invariance_rows("model", engine.model, attrs.evolve(SIZES, blocks=engine.pool.total))
    engine.close()
    assert len(rows) == 1 + len(HISTORIES)
    assert failing(rows) == set(), [row.note for row in rows]


class ByBatch(PlainKernels):
    """A sum whose last bit depends on how many rows there are beside it."""

    def linear(self, x, weight, out):
        super().linear(x, weight, out)
        exact = self.operations.pop()

        def run(batch):
            exact(batch)
            out.data = out.data * np.float32(1 + 2**-22 * (len(batch.tokens) > 8))

        self.operations.append(run)


class ByCut(PlainKernels):
    """A chunk's rows come out otherwise when a chunk went before."""

    def attention(self, queries, layer, out):
        super().attention(queries, layer, out)
        exact = self.operations.pop()

        def run(batch):
            exact(batch)
            for first, rows, start in batch.sequences:
                if start and rows > 1:
                    out.data[first : first + rows] *= np.float32(1 + 2**-20)

        self.operations.append(run)


class Forgetful(PlainKernels):
    """Every hundredth step leaves wrong values in the cache."""

    steps = 0

    def start(self, program, batch):
        result = super().start(program, batch)
        self.steps += 1
        if self.steps % 100 == 0:
            self.values[:, batch.slots] += 1
        return result


class Constant(PlainKernels):
    """Says the same, whatever it is asked."""

    def logits(self, x, weight):
        self.operations.append(
            lambda batch: setattr(
                self, "result", np.zeros((len(batch.logit_rows), CONFIG.vocab_size), np.float32)
            )
        )


class Nan(PlainKernels):
    def logits(self, x, weight):
        self.operations.append(
            lambda batch: setattr(self, "result", np.full((len(batch.logit_rows), 67), np.nan, np.float32))
        )


def test_a_sum_that_depends_on_the_batch_is_seen():
    found = failing(invariance_rows("model", plain(ByBatch), SIZES))
    assert {"in a crowd", "cut into chunks"} <= found
    assert "alone again" not in found


def test_a_chunk_that_depends_on_the_one_before_is_seen():
    rows = invariance_rows("model", plain(ByCut), SIZES)
    assert "cut into chunks" in failing(rows)
    assert "alone again" not in failing(rows)
    assert (
        "alone" in by_history(rows)["cut into chunks"].note
        or "same" in by_history(rows)["cut into chunks"].note
    )


def test_what_is_not_the_same_twice_is_seen():
    assert failing(invariance_rows("model", plain(Forgetful), SIZES))


@pytest.mark.parametrize(("kernels", "why"), [(Constant, ""), (Nan, "no finite distribution")])
def test_replies_that_prove_nothing_fail_at_once(kernels, why):
    rows = invariance_rows("model", plain(kernels), SIZES)
    assert failing(rows) == {"alone"}
    assert len(rows) == 1
    assert why in rows[0].note


def test_a_scheduler_that_resumes_with_another_token_is_seen(monkeypatch):
    preempt = Scheduler._preempt

    def spoil(self, plan, victim):
        preempt(self, plan, victim)
        victim.tokens[-1] = (victim.tokens[-1] + 1) % CONFIG.vocab_size

    monkeypatch.setattr(Scheduler, "_preempt", spoil)
    assert failing(invariance_rows("model", plain(), SIZES)) == {"preempted"}


def test_a_cache_that_gives_another_prefix_is_seen(monkeypatch):
    match = BlockPool.match
    monkeypatch.setattr(BlockPool, "match", lambda self, digests: match(self, digests)[::-1])
    found = failing(invariance_rows("model", plain(), SIZES))
    assert "from the prefix cache" in found
    assert found <= {"from the prefix cache", "preempted"}


def test_a_reply_that_is_not_taken_up_where_it_was_is_seen(monkeypatch):
    add = Scheduler.add

    def forget_one(self, request):
        sequence = add(self, request)
        if len(request.emitted) > 1:
            sequence.tokens[-1] = (sequence.tokens[-1] + 1) % CONFIG.vocab_size
        return sequence

    monkeypatch.setattr(Scheduler, "add", forget_one)
    assert failing(invariance_rows("model", plain(), SIZES)) == {"taken up again"}


@pytest.mark.parametrize(
    ("history", "change", "why"),
    [
        ("preempted", {"prompts": (3,), "reply": 4}, "not preempted"),
        ("together", {"prompts": (3,)}, "no two"),
        ("cut into chunks", {"prompts": (2, 3)}, "long enough"),
        ("from the prefix cache", {"prompts": (2, 3), "reply": 4}, "prefix cache"),
        ("in a crowd", {"blocks": 4, "prompts": (3,), "reply": 4}, "of 10"),
    ],
)
def test_a_history_without_what_it_is_there_for_proves_nothing(history, change, why):
    model, sizes = plain(), attrs.evolve(SIZES, **change)
    trial = Trial(model, sizes, gpu_invariance.requests_for(model, sizes))
    row = gpu_invariance._compared("model, x", trial, gpu_invariance.alone(trial), HISTORIES[history])
    assert row.value is None
    assert row.note.startswith("failed: Unproved")
    assert why in row.note


def test_one_history_that_breaks_leaves_the_others_their_rows(monkeypatch):
    def burst(_trial):
        raise GpuFull("no memory")

    monkeypatch.setitem(HISTORIES, "together", burst)
    rows = by_history(invariance_rows("model", plain(), SIZES))
    assert rows["together"].note == "failed: GpuFull: no memory"
    assert rows["preempted"].value == 0


class Cheap(PlainKernels):
    """A token and its place decide what comes next: nothing to compute, so that a card's sizes take no time."""

    def record(self, forward):
        return []

    def start(self, program, batch):
        rows = batch.logit_rows
        seeds = batch.tokens[rows] * 0.61 + batch.positions[rows] * 0.37
        self.result = (5 * np.sin(seeds[:, None] * np.arange(1, CONFIG.vocab_size + 1))).astype(np.float32)
        return super().start(program, batch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [gpu_invariance.ON_CARD, attrs.evolve(gpu_golden.SIZES, blocks=4096)])
def test_with_a_cards_sizes_every_history_takes_place(sizes):
    kernels = Cheap(Weights(), 16)
    kernels.config = attrs.evolve(CONFIG, context_length=gpu_invariance.MADE_UP.context_length)
    model = Llama(kernels.source, kernels)
    model.config = kernels.config
    rows = invariance_rows("model", model, sizes)
    assert failing(rows) == set(), [row.note for row in rows]


# The same over the CUDA text on the CPU: the path that runs on a card, with other memory under it.

ON_SHIM = Sizes(rows=40, sequences=9, blocks=60, prompts=(1, 33, 18), reply=17, few=3)


@pytest.mark.slow
@needs_compiler
def test_passes_over_the_cuda_text():
    device = ShimDevice(MODULES)
    rows = made_up_rows(device, CONFIG, ON_SHIM)
    assert failing(rows) == set(), [row.note for row in rows]
    assert [row.value for row in rows[1:-1]] == [0] * len(HISTORIES)
    assert by_history(rows)["graphs of decode steps"].value >= 3
    assert device.replays > 20
    assert device.closed


class Skipping(ShimDevice):
    """Its graphs lack their last attention: what a step before left there is read."""

    def capture(self, launches):
        whole = super().capture(launches)
        return Graph(self, whole.launches[:-6] + whole.launches[-5:])


class Rounding(ShimDevice):
    """The kernel for more than eight tokens rounds otherwise in one element of each launch."""

    def function(self, stem, name, shared):
        exact = super().function(stem, name, shared)
        if not name.startswith("linear_bf16_4"):
            return exact

        def launch(grid, block, arguments, *, shared_mem):
            exact(grid, block, arguments, shared_mem=shared_mem)
            result = arguments[6]

            def spoil():
                result.reshape(-1).view(np.uint16)[0] ^= 1

            (self.stream if self.recording is None else self.recording).append(spoil)

        return launch


class NoGraphs(ShimDevice):
    def capture(self, launches):
        raise GpuFull("no memory for a graph")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("device", "seen"),
    [(Skipping, "in a crowd"), (Rounding, "cut into chunks"), (NoGraphs, "graphs of decode steps")],
)
def test_a_broken_device_is_seen(device, seen):
    assert seen in failing(made_up_rows(device(MODULES), CONFIG, ON_SHIM))
