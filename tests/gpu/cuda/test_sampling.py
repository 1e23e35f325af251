"""Sampling against float64 on a sorted row."""

import numpy as np
import pytest

from gpu.philox import uniform
from tests.gpu.cuda.arrays import Guarded, batch_of, guarded, step_of, step_words

pytestmark = pytest.mark.compiler

TOP = 20


def sample(kernel, logits, **params):
    """Tokens, their log-probabilities, and the likeliest tokens with theirs."""
    count, vocabulary = logits.shape
    batch = batch_of([0] * count, logit_rows=range(count), **params)
    result = Guarded((count, 2 + 2 * TOP), np.int32)
    saved = Guarded((step_words(batch, batch.sequences[:, 0]),), np.float32)
    work = Guarded(logits.shape, np.float32)
    work.array[...] = logits
    kernel("sampling", "sample")(
        (count + 1,),
        (512,),
        (step_of(batch), work.array, np.int32(vocabulary), saved.array, result.array),
        shared_mem=5120,
    )
    work.checked(), saved.checked()
    words = result.checked()
    chances = words.view(np.float32)
    return words[:, 0], chances[:, 1], words[:, 2 : 2 + TOP], chances[:, 2 + TOP :]


def adjusted(logits, bias=(), penalties=(), repetition=1.0, presence=0.0, frequency=0.0):
    out = logits.astype(np.float64)
    for token, value in bias:
        out[token] += value
    for token, count in penalties:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= count * frequency + (count > 0) * presence
    return out


def distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Kept tokens, likeliest first, and their probabilities."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits[order] - logits[order[0]]) / temperature)
    keep = min(top_k or len(p), int((p >= min_p).sum()))
    p = p[:keep] / p[:keep].sum()
    keep = int(np.searchsorted(np.cumsum(p), top_p)) + 1
    return order[:keep], p[:keep] / p[:keep].sum()


def log_softmax(logits):
    raw = logits.astype(np.float64)
    raw = raw - raw.max()
    return raw - np.log(np.exp(raw).sum())


def random_logits(random, count, vocabulary):
    return (random.standard_normal((count, vocabulary)) * 4).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 33, 512, 1537])
def test_greedy_takes_the_likeliest_and_of_equals_the_first(kernel, random, vocabulary):
    logits = np.round(random_logits(random, 3, vocabulary))
    tokens, chances, _, _ = sample(kernel, logits)
    assert tokens.tolist() == logits.argmax(1).tolist()
    for row in range(3):
        assert abs(chances[row] - log_softmax(logits[row])[tokens[row]]) < 1e-5


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 3.0},
        {"temperature": 0.05, "top_p": 0.5},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_k": 10**9, "top_p": 0.999},
    ],
    ids=str,
)
def test_draws_as_a_sorted_float64_row_does(kernel, random, params):
    params = {"temperature": 0.9} | params
    count = 8
    logits = random_logits(random, count, 800)
    seeds = random.integers(0, 2**64, count, np.uint64)
    tokens, _, _, _ = sample(kernel, logits, seed=seeds, position=range(count), **params)
    for row in range(count):
        order, p = distribution(logits[row].astype(np.float64), **params)
        u = uniform(int(seeds[row]), row)
        cumulative = np.cumsum(p)
        at = order.tolist().index(tokens[row])
        assert (cumulative[at - 1] if at else 0) - 1e-6 <= u <= cumulative[at] + 1e-6


def test_among_equals_the_earlier_come_first(kernel):
    logits = np.zeros((64, 700), np.float32)
    tokens, _, _, _ = sample(kernel, logits, temperature=1.0, top_k=50, seed=5, position=range(64))
    expected = [int(uniform(5, position) * 50) for position in range(64)]
    assert tokens.tolist() == expected


def test_bias_and_penalties_change_the_draw_but_not_the_log_probability(kernel, random):
    logits = random_logits(random, 2, 300)
    best = logits.argmax(1)
    bias = [[(int(best[0]), -np.inf), (3, 2.5), (250, 30.0)], [(7, 1.0)]]
    penalties = [[(250, 2), (9, 0)], [(int(best[1]), 3), (7, 1), (100, 0)]]
    strength = {"repetition": 1.5, "presence": 0.7, "frequency": 0.4}
    tokens, chances, _, _ = sample(kernel, logits, biases=bias, penalties=penalties, **strength)
    for row in range(2):
        expected = adjusted(logits[row], bias[row], penalties[row], **strength)
        assert tokens[row] == expected.argmax()
        assert abs(chances[row] - log_softmax(logits[row])[tokens[row]]) < 1e-5


def test_a_forbidden_token_is_never_drawn(kernel, random):
    logits = np.zeros((40, 3), np.float32)
    tokens, _, _, _ = sample(
        kernel, logits, temperature=2.0, biases=[[(1, -np.inf)]] * 40, seed=1, position=range(40)
    )
    assert set(tokens.tolist()) == {0, 2}


@pytest.mark.parametrize("wanted", [-1, 0, 1, 5, 20])
def test_the_likeliest_tokens_best_first(kernel, random, wanted):
    logits = random_logits(random, 1, 400)
    _, _, tokens, chances = sample(kernel, logits, logprobs=wanted, temperature=1.0, biases=[[(3, 9.0)]])
    order = np.argsort(-logits[0], kind="stable")[: max(wanted, 0)]
    assert tokens[0, : len(order)].tolist() == order.tolist()
    assert np.allclose(chances[0, : len(order)], log_softmax(logits[0])[order], atol=1e-5)
    assert not tokens[0, len(order) :].any()


def test_fewer_tokens_than_were_asked_for(kernel):
    _, _, tokens, chances = sample(kernel, np.array([[1.0, 2.0]], np.float32), logprobs=5)
    assert tokens[0, :3].tolist() == [1, 0, 0]
    assert chances[0, 2] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(kernel, random, bad):
    logits = random_logits(random, 3, 90)
    logits[1, 44] = bad
    tokens, chances, _, _ = sample(kernel, guarded(logits), temperature=[0.0, 1.0, 0.0], logprobs=2)
    assert tokens[1] == -1
    assert chances[1] == 0
    assert tokens[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()


def test_everything_forbidden_is_told(kernel):
    tokens, _, _, _ = sample(kernel, np.zeros((1, 2), np.float32), biases=[[(0, -np.inf), (1, -np.inf)]])
    assert tokens[0] == -1
