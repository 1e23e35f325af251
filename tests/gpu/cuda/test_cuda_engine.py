"""The engine over the CUDA kernels: a model loaded as on a card, many requests together and alone."""

import pytest

from gpu.engine import Engine
from gpu.engine_on_gpu import load_engine_on_gpu
from gpu.errors import ModelError
from gpu.kernels.cuda import Limits
from gpu.kernels.cuda_load import load_on_gpu
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from tests.gpu.cuda.shim_device import ShimDevice
from tests.gpu.cuda.test_cuda_kernels import MODULES
from tests.gpu.cuda.tiny_model import tiny_model

pytestmark = pytest.mark.compiler

LIMITS = Limits(rows=40, sequences=3, context=64)
PROMPTS = {
    "greedy": (tuple(range(1, 30)), SamplingParams(max_tokens=3, temperature=0.0)),
    "drawn": ((7, 8), SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=11)),
    "penalised": ((9,) * 17, SamplingParams(max_tokens=3, temperature=1.0, frequency_penalty=0.5, seed=3)),
}


def engine_on_cuda(source):
    model, blocks = load_on_gpu(source, ShimDevice(MODULES), LIMITS)
    return Engine(model, eos_ids=(), blocks=blocks, max_batch=3, token_budget=40)


def replies(engine, names, emitted=None):
    for name in names:
        prompt, params = PROMPTS[name]
        engine.add(Request(name, prompt, params, emitted=(emitted or {}).get(name, ())))
    found = {name: [] for name in names}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.id] += output.tokens
    return found


def test_replies_are_the_same_together_alone_and_resumed(random):
    source = tiny_model(random)
    together = replies(engine_on_cuda(source), PROMPTS)
    assert {len(tokens) for tokens in together.values()} == {3}
    for name in PROMPTS:
        assert replies(engine_on_cuda(source), [name]) == {name: together[name]}
    resumed = replies(engine_on_cuda(source), PROMPTS, {name: tuple(together[name][:1]) for name in PROMPTS})
    assert resumed == {name: tokens[1:] for name, tokens in together.items()}


def test_the_card_works_while_tokens_are_given_out_and_a_cancel_then_changes_no_other_reply(random):
    source = tiny_model(random)
    expected = replies(engine_on_cuda(source), PROMPTS)
    engine = engine_on_cuda(source)
    device = engine.model.kernels.device
    for name, (prompt, params) in PROMPTS.items():
        engine.add(Request(name, prompt, params))
    found = {name: [] for name in PROMPTS}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.id] += output.tokens
        assert bool(device.stream) == engine.has_work
        if found["penalised"] and engine.cancel("penalised"):
            engine.add(Request("again", *PROMPTS["drawn"]))  # takes the place, and soon the blocks
            found["again"] = []
    assert found.pop("again") == expected["drawn"]
    assert found.pop("penalised") == expected.pop("penalised")[:1]
    assert found == expected


def test_the_cache_takes_what_is_left_and_no_more_than_can_be_used(random):
    source = tiny_model(random)
    device = ShimDevice(MODULES)
    model, blocks = load_on_gpu(source, device, LIMITS)
    assert blocks == 3 * 4
    _, few = load_on_gpu(source, ShimDevice(MODULES), LIMITS, kv_bytes=5 * model.kernels.block_bytes)
    assert few == 5


def test_a_model_that_leaves_no_room_is_refused(random):
    with pytest.raises(ModelError, match="too little for any context"):
        load_on_gpu(tiny_model(random), ShimDevice(MODULES, total=1 << 16), LIMITS)


def test_a_file_is_loaded_as_on_the_cpu(tiny):
    engine = load_engine_on_gpu(tiny, ShimDevice(MODULES), max_batch=2, token_budget=24)
    on_cpu = Engine.load(tiny, max_batch=2, token_budget=24, kv_bytes=1 << 20)
    request = Request("one", tuple(range(20)), SamplingParams(max_tokens=1, temperature=0.0, logprobs=5))
    found = []
    for side in (engine, on_cpu):
        side.add(request)
        (output,) = side.step().outputs
        found.append(dict(output.logprobs[0].top))
        assert side.context_length == 512
        side.close()
    shared = found[0].keys() & found[1].keys()
    assert len(shared) >= 4
    assert all(abs(found[0][token] - found[1][token]) < 0.1 for token in shared)


def test_a_file_that_cannot_be_run_leaves_nothing_on_the_card(tiny):
    device = ShimDevice(MODULES, total=1 << 16)
    with pytest.raises(ModelError):
        load_engine_on_gpu(tiny, device)
    assert device.closed
