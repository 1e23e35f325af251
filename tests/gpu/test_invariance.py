"""A sequence's bits are its own: alone, in company, cut anyhow, preempted, cancelled around, and taken up again."""

import random

import pytest
from driving import Reply, drain, load, note
from late_kernels import load_late

from gpu.sampling_params import SamplingParams
from gpu.sequence import Request

HISTORIES = 240
_NAMES = ("a", "b", "c", "d", "e")


def _requests(seed):
    """Five requests of all kinds; the same for every history that compares against them."""
    rng = random.Random(seed)
    out = []
    for name in _NAMES:
        prompt = tuple(rng.randrange(250) for _ in range(rng.choice([1, 5, 16, 31, 33, 60])))
        params = SamplingParams(
            max_tokens=rng.choice([1, 6, 20, 34]),
            temperature=rng.choice([0.0, 0.7, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=rng.randrange(2**64),
            ignore_eos=True,
            logprobs=2,
        )
        out.append(Request(name, prompt, params, owner=rng.choice(["x", "y"])))
    return out


@pytest.fixture(scope="module", params=[load, load_late], ids=["in turn", "overlapping"])
def engines(request, tiny):
    """One with room, to say what is right; one with seven blocks, to be tormented."""
    block = load(tiny).model.kernels.block_bytes
    made = load(tiny), request.param(tiny, kv_bytes=7 * block, max_batch=4, token_budget=24, threads=2)
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def golden(engines):
    """Seed → name → the reply when nothing else runs and nothing is cached."""
    known = {}

    def of(seed):
        if seed not in known:
            known[seed] = {}
            for request in _requests(seed):
                engines[0].pool.clear_cache()
                engines[0].add(request)
                known[seed] |= drain(engines[0])
        return known[seed]

    return of


def _torment(engine, requests, rng):
    """Add, step, cancel, take up again, cut and forget at random; what each request got in the end."""
    waiting = list(requests)
    got: dict[str, Reply] = {}
    lives = dict.fromkeys(_NAMES, 0)
    preempted = 0
    while waiting or engine.has_work:
        engine.scheduler.token_budget = rng.choice([5, 9, 24])
        engine._governor.chunk = rng.choice([1, 3, 16])
        if waiting and rng.random() < 0.5:
            request = waiting.pop(rng.randrange(len(waiting)))
            before = tuple(got.get(request.id, Reply()).tokens)
            engine.add(Request(
                request.id, request.prompt, request.params, before, request.owner, priority=rng.choice([0, 0, 1])
            ))  # fmt: skip
            got.setdefault(request.id, Reply()).finish = ""
        output = engine.step()
        preempted += output.stats.preemptions
        note(got, output)
        assert engine.pool.free + engine.pool.cached + engine.pool.in_use == engine.pool.total
        if rng.random() < 0.1 and (names := sorted(engine._sequences)):
            name = rng.choice(names)
            if lives[name] < 2:
                lives[name] += 1
                engine.cancel(name)
                while engine._ended:
                    note(got, engine.step())
                if got[name].finish == "cancelled":
                    waiting.append(next(request for request in requests if request.id == name))
        if rng.random() < 0.1:
            engine.pool.clear_cache()
    return got, preempted


def test_any_history_gives_the_same_bits(engines, golden):
    torments, preempted = engines[1], 0
    for history in range(HISTORIES):
        rng = random.Random(history)
        requests = _requests(history % 12)
        got, count = _torment(torments, requests, rng)
        preempted += count
        for name, reply in golden(history % 12).items():
            assert got[name].tokens == reply.tokens, (history, name)
            assert got[name].logprobs == reply.logprobs, (history, name)
        assert torments.pool.in_use == 0
    assert preempted > HISTORIES / 10


def test_fifteen_neighbours_change_no_bit(tiny):
    engine = load(tiny, max_batch=16, token_budget=64)
    request = _requests(3)[4]
    engine.add(request)
    alone = drain(engine)[request.id]
    engine.pool.clear_cache()
    for i in range(15):
        engine.add(Request(f"n{i}", tuple(range(i, 60)), SamplingParams(max_tokens=30, seed=i), owner=str(i)))
    engine.add(request)
    crowded = drain(engine)[request.id]
    assert (crowded.tokens, crowded.logprobs) == (alone.tokens, alone.logprobs)
    engine.close()
