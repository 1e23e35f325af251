"""The decoder on the CUDA kernels, from weights to tokens, with the card's part played by the CPU."""

import numpy as np
import pytest

from gpu.errors import GpuFull, ModelError, StepTooLarge
from gpu.kernels.cuda import CudaKernels, Limits
from gpu.llama import Llama
from tests.gpu.cuda.arrays import batch_of, close
from tests.gpu.cuda.shim_device import ShimDevice
from tests.gpu.cuda.tiny_model import tiny_model
from tests.gpu.reference import reference_logprobs

pytestmark = pytest.mark.compiler

MODULES = {}
BLOCKS = 24


def on_cuda(source, *, rows=80, sequences=4, context=320):
    device = ShimDevice(MODULES)
    kernels = CudaKernels(source, device, Limits(rows, sequences, context))
    model = Llama(source, kernels)
    kernels.allocate_cache(BLOCKS)
    return model, device


def step_over(pieces, **sampling):
    """A batch of (table, tokens, position of the first, whether to sample) pieces."""
    tokens, positions, slots, spans, logit_rows = [], [], [], [], []
    columns = max(len(table) for table, *_ in pieces)
    for table, piece, start, is_last in pieces:
        spans.append((len(tokens), len(piece), start))
        at = np.arange(start, start + len(piece))
        tokens += list(piece)
        positions += at.tolist()
        slots += (np.array(table)[at // 16] * 16 + at % 16).tolist()
        if is_last:
            logit_rows.append(len(tokens) - 1)
    tables = [list(table) + [2**30] * (columns - len(table)) for table, *_ in pieces]
    return batch_of(
        tokens,
        positions=positions,
        slots=slots,
        spans=spans,
        tables=tables,
        logit_rows=logit_rows,
        **sampling,
    )


def likeliest(result):
    """Of the first sample: token to log-probability."""
    return dict(zip(result.top_tokens[0].tolist(), result.top_logprobs[0].tolist(), strict=True))


@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dressed", [False, True])
def test_log_probabilities_agree_with_the_plain_decoder(random, kind, dressed):
    source = tiny_model(random, kind=kind, dressed=dressed)
    tokens = random.integers(0, 128, 22).tolist()
    exact = reference_logprobs(source, tokens)
    model, _ = on_cuda(source)
    prefilled = model.step(step_over([([3, 1], tokens[:21], 0, True)], logprobs=20))
    decoded = model.step(step_over([([3, 1], tokens[21:], 21, True)], logprobs=20))
    for row, result in ((20, prefilled), (21, decoded)):
        found = likeliest(result)
        assert close(np.array(list(found.values())), exact[row][list(found)], 0.03)
        assert len(found.keys() & set(np.argsort(-exact[row])[:20].tolist())) >= 17


def everything(result):
    return [
        array.tobytes() for array in (result.tokens, result.logprobs, result.top_tokens, result.top_logprobs)
    ]


def test_a_sequence_is_the_same_bits_alone_or_in_a_batch_and_however_its_prompt_is_cut(random):
    source = tiny_model(random)
    prompt = random.integers(0, 128, 70).tolist()
    other = random.integers(0, 128, 33).tolist()
    model, _ = on_cuda(source)
    table = [4, 9, 2, 7, 11]
    logprobs = {"logprobs": 20}
    whole = model.step(step_over([(table, prompt, 0, True)], **logprobs))
    decoded = model.step(step_over([(table, [1], 70, True)], **logprobs))

    model, _ = on_cuda(source)
    model.step(step_over([([0, 1, 3], other, 0, True), (table, prompt[:13], 0, False)], **logprobs))
    model.step(step_over([(table, prompt[13:14], 13, False), ([0, 1, 3], [8], 33, True)], **logprobs))
    cut = model.step(step_over([(table, prompt[14:], 14, True)], **logprobs))
    together = model.step(step_over([(table, [1], 70, True), ([0, 1, 3], [8], 34, True)], **logprobs))
    assert everything(cut) == everything(whole)
    assert likeliest(together) == likeliest(decoded)
    assert together.tokens[0] == decoded.tokens[0]

    model, _ = on_cuda(source)  # what was decoded, computed again as a prompt
    again = model.step(step_over([(table, [*prompt, 1], 0, True)], **logprobs))
    assert everything(again) == everything(decoded)


def test_decoding_replays_a_graph_and_takes_no_memory(random):
    source = tiny_model(random)
    model, device = on_cuda(source)
    model.step(step_over([([0, 1], [3, 4, 5], 0, True), ([2], [6], 0, True)]))
    tables = [0, 1], [2, 3]
    plain = [model.step(step_over([(tables[0], [7], 3, True), (tables[1], [8], 1, True)])).tokens.tolist()]
    taken, launched = device.allocations, len(device.launched)
    for position in range(4, 9):
        pieces = [(tables[0], [7], position, True), (tables[1], [8], position - 2, True)]
        plain.append(model.step(step_over(pieces)).tokens.tolist())
    assert device.allocations == taken
    assert device.replays == 5
    assert len(device.launched) - launched == 5  # sampling stands outside the graph
    fresh, _ = on_cuda(source)
    fresh.step(step_over([([0, 1], [3, 4, 5], 0, True), ([2], [6], 0, True)]))
    for position, tokens in enumerate(plain, 3):  # in steps of one sequence, in other buckets
        for row in range(2):
            piece = (tables[row], [7 + row], position - 2 * row, True)
            assert fresh.step(step_over([piece])).tokens[0] == tokens[row]


def test_a_step_is_started_without_waiting_and_its_batch_may_be_used_again(random):
    model, device = on_cuda(tiny_model(random))
    batch = step_over([([0], [3], 0, True)])
    expected = model.step(batch).tokens.tolist()
    started = model.start(batch)
    assert device.stream, "the step has run already"
    for array in (batch.tokens, batch.positions, batch.slots, batch.tables, batch.sampling.seed):
        array[...] = 1
    assert model.finish(started).tokens.tolist() == expected


def test_what_a_start_that_failed_half_way_left_behind_harms_no_later_step(random, monkeypatch):
    source = tiny_model(random)
    model, device = on_cuda(source)
    batches = [step_over([([0], [3], 0, True)]), step_over([([1], [9, 9], 0, True)])]
    expected = [model.step(batch).tokens.tolist() for batch in batches]
    fresh, device = on_cuda(source)
    function, loaded = device.function, []

    def full(stem, name, shared):
        loaded.append(name)
        if len(loaded) == 4:
            raise GpuFull("the GPU's memory is full")
        return function(stem, name, shared)

    monkeypatch.setattr(ShimDevice, "function", lambda _self, *what: full(*what))
    with pytest.raises(GpuFull):
        fresh.start(batches[0])
    assert device.stream
    assert [fresh.step(batch).tokens.tolist() for batch in reversed(batches)] == expected[::-1]


def test_a_step_without_samples_brings_nothing_back(random):
    model, _ = on_cuda(tiny_model(random))
    result = model.step(step_over([([0], [3, 4], 0, False)]))
    assert result.tokens.shape == (0,)
    assert result.top_tokens.shape == (0, 20)
    assert result.bytes_moved > 0


def test_the_cache_is_sized_from_what_is_left(random):
    model, device = on_cuda(tiny_model(random))
    blocks = model.kernels.cache_blocks()
    free, total = device.memory()
    assert blocks * model.kernels.block_bytes <= free - total * 0.05
    device.total = device.used
    with pytest.raises(ModelError, match="too little for any context"):
        model.kernels.cache_blocks()


def test_a_new_cache_forgets_the_graphs_over_the_old_one(random):
    model, device = on_cuda(tiny_model(random))
    batch = step_over([([0], [3], 0, True)])
    first = model.step(batch).tokens[0]
    model.kernels.allocate_cache(2)
    assert model.step(batch).tokens[0] == first
    assert device.replays == 0


def test_a_step_that_does_not_fit_is_refused_and_harms_nothing(random):
    model, _ = on_cuda(tiny_model(random), rows=4, sequences=1, context=32)
    good = step_over([([0], [3], 0, True)])
    first = model.step(good).tokens[0]
    with pytest.raises(StepTooLarge, match="token budget"):
        model.step(step_over([([0], [3], 0, True)], biases=[[(i, 1.0) for i in range(4000)]]))
    assert model.step(good).tokens[0] == first


def test_without_memory_for_a_graph_a_step_runs_all_the_same(random, monkeypatch):
    model, device = on_cuda(tiny_model(random))
    batch = step_over([([0], [3], 0, True)])
    expected = model.step(batch).tokens[0]
    model.program.graphs.clear()

    def full(_launches):
        raise GpuFull("the GPU's memory is full")

    with monkeypatch.context() as short:
        short.setattr(ShimDevice, "capture", lambda _self, launches: full(launches))
        assert [model.step(batch).tokens[0] for _ in range(2)] == [expected] * 2
    assert device.replays == 0
    assert [model.step(batch).tokens[0] for _ in range(2)] == [expected] * 2
    assert device.replays == 1


def test_close_gives_everything_back_and_may_come_twice(random):
    model, device = on_cuda(tiny_model(random))
    model.step(step_over([([0], [3], 0, True)]))
    model.kernels.close()
    model.kernels.close()
    assert device.closed
    assert not model.program.graphs
