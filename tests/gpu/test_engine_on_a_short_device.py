"""Steps that a device cannot take: too large for its buffers, or at a moment when it has no memory."""

import pytest
from attrs import evolve
from driving import ask, drain, greedy, load

from gpu.errors import GpuFull, StepTooLarge
from gpu.sequence import Request

PROMPTS = {"a": tuple(range(40, 77)), "b": (5,) * 20, "c": (9, 8, 7)}
BIASES = tuple((token, -1.0) for token in range(50))


@pytest.fixture
def engine(tiny):
    made = load(tiny)
    yield made
    assert made.pool.in_use == 0
    made.close()


def refusing(engine, monkeypatch, refuse):
    """Have the model's start raise what `refuse(batch)` returns, if anything."""
    start = engine.model.start

    def checked(batch):
        fault = refuse(batch)
        if fault is not None:
            raise fault
        return start(batch)

    monkeypatch.setattr(engine.model, "start", checked)


def test_what_makes_a_step_too_large_ends_and_nothing_else(engine, monkeypatch):
    alone = {name: ask(engine, prompt).tokens for name, prompt in PROMPTS.items()}

    def too_many_biases(batch):
        return StepTooLarge("50 biases") if len(batch.sampling.bias_tokens) >= len(BIASES) else None

    refusing(engine, monkeypatch, too_many_biases)
    for name, prompt in PROMPTS.items():
        engine.add(Request(name, prompt, greedy()))
    engine.step()
    engine.add(Request("heavy", (1, 2, 3), greedy(logit_bias=BIASES)))
    engine.add(Request("behind it", PROMPTS["c"], greedy()))
    replies = drain(engine)
    assert (replies["heavy"].finish, replies["heavy"].error) == ("error", "50 biases")
    assert replies["heavy"].tokens == []
    assert replies["behind it"].tokens == alone["c"]
    assert {name: replies[name].finish for name in PROMPTS} == dict.fromkeys(PROMPTS, "length")


def test_penalties_count_as_what_makes_a_step_too_large(engine, monkeypatch):
    refusing(
        engine,
        monkeypatch,
        lambda batch: StepTooLarge("penalties") if len(batch.sampling.penalty_tokens) > 9 else None,
    )
    engine.add(Request("penalised", tuple(range(30)), greedy(repetition_penalty=1.1)))
    engine.add(Request("biased", (1, 2), greedy(logit_bias=BIASES[:5])))
    replies = drain(engine)
    assert replies["penalised"].finish == "error"
    assert replies["biased"].finish == "length"


@pytest.mark.parametrize("failing", [(0,), (1, 2, 3), (4,)])
def test_a_step_without_memory_can_be_tried_again(engine, monkeypatch, failing):
    params = {
        "a": greedy(),
        "b": evolve(greedy(frequency_penalty=0.5), temperature=0.9, seed=4),
        "c": greedy(3),
    }
    expected = {name: ask(engine, prompt, params[name]).tokens for name, prompt in PROMPTS.items()}
    engine.pool.clear_cache()
    tries = iter(range(1000))
    refusing(engine, monkeypatch, lambda _: GpuFull("full") if next(tries) in failing else None)
    for name, prompt in PROMPTS.items():
        engine.add(Request(name, prompt, params[name]))
    found = {name: [] for name in PROMPTS}
    fulls = 0
    while engine.has_work:
        try:
            output = engine.step()
        except GpuFull:
            fulls += 1
            continue
        for out in output.outputs:
            found[out.id] += out.tokens
    assert fulls == len(failing)
    assert found == expected
