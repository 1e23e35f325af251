"""Each sampling parameter, alone and together, against the plain reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampling import adjusted, draw, kept, log_softmax

from gpu.kernels import MAX_TOP_LOGPROBS, SamplingBatch
from gpu.kernels import header as h
from gpu.kernels.draw import draw as operation
from gpu.kernels.draw import uniform as kernel_uniform
from gpu.kernels.host import _compiled, _sampling_words
from gpu.kernels.jit import native
from gpu.kernels.threads import Crew
from gpu.philox import philox, uniform

VOCAB, PADDED = 1003, 1008


def sample(logits, **settings_):
    """Run the kernel on rows of logits; scalars count for every row. Returns tokens, logprobs, top ids, top logprobs."""
    rows = len(logits)

    def column(name, kind, default):
        return np.broadcast_to(np.array(settings_.get(name, default), kind), (rows,)).copy()

    bias, counts = dict(settings_.get("bias", ())), settings_.get("counts", {})
    batch = SamplingBatch(
        temperature=column("temperature", np.float32, 1.0),
        top_p=column("top_p", np.float32, 1.0),
        min_p=column("min_p", np.float32, 0.0),
        top_k=column("top_k", np.int32, 0),
        seed=column("seed", np.uint64, 0),
        position=column("position", np.int32, 0),
        logprobs=column("logprobs", np.int32, 0),
        repetition=column("repetition", np.float32, 1.0),
        presence=column("presence", np.float32, 0.0),
        frequency=column("frequency", np.float32, 0.0),
        penalty_starts=np.arange(rows + 1, dtype=np.int32) * len(counts),
        penalty_tokens=np.array(list(counts) * rows, np.int32),
        penalty_counts=np.array(list(counts.values()) * rows, np.int32),
        bias_starts=np.arange(rows + 1, dtype=np.int32) * len(bias),
        bias_tokens=np.array(list(bias) * rows, np.int32),
        bias_values=np.array(list(bias.values()) * rows, np.float32),
    )  # fmt: skip
    padded = np.zeros((rows, PADDED), np.float32)
    padded[:, :VOCAB] = logits
    header = np.zeros(h.WORDS, np.int64)
    for index, array in _sampling_words(batch).items():
        header[index] = array.ctypes.data
    tokens, logprobs = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    top, top_logprobs = (
        np.zeros((rows, MAX_TOP_LOGPROBS), np.int32),
        np.zeros((rows, MAX_TOP_LOGPROBS), np.float32),
    )
    scratch = np.zeros((1, 4 * PADDED), np.int32)
    arguments = np.array(
        [
            header.ctypes.data, padded.ctypes.data, 4 * PADDED, VOCAB, PADDED, scratch.ctypes.data, 16 * PADDED,
            tokens.ctypes.data, logprobs.ctypes.data, top.ctypes.data, top_logprobs.ctypes.data,
        ],
        np.int64,
    )  # fmt: skip
    program = np.array([[_compiled(operation), arguments.ctypes.data, 0, rows]], np.int64)
    Crew(1).run(program, 0, 1, np.ones(1, np.int64), np.zeros((1, 16), np.int64))
    return tokens, logprobs, top, top_logprobs


def _logits(seed, rows=1, spread=2.0):
    return (spread * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


cuts = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-4, 0.3, 0.7, 1.0, 1.7, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 50, 999, 1003, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    }
)


@settings(max_examples=250, deadline=None)
@given(cuts, st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(0, 50))
def test_the_token_is_the_reference_s(settings_, seed, position, which):
    logits = _logits(which)
    expected, margin = draw(logits[0].astype(np.float64), seed=seed, position=position, **settings_)
    token = sample(logits, seed=seed, position=position, **settings_)[0][0]
    if margin > 1e-5:
        assert token == expected
    # Near the edge between two tokens, rounding may choose the neighbour; but never one that was cut.
    assert (
        kept(logits[0].astype(np.float64), **{**settings_, "top_p": min(1.0, settings_["top_p"] + 1e-5)})[
            token
        ]
        > 0
    )


def test_a_cut_that_only_a_flat_row_can_make_looks_at_every_token():
    logits = np.zeros((1, VOCAB), np.float32)
    for position in range(40):
        share = uniform(3, position)
        token = sample(logits, top_p=0.5, seed=3, position=position)[0][0]
        assert abs(token - int(share * 502)) <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 100),
    st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 5), max_size=30),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=10),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
)
def test_bias_and_penalties_are_the_reference_s(which, counts, bias, repetition, presence, frequency):
    logits = _logits(which)
    more = {"repetition": repetition, "presence": presence, "frequency": frequency}
    plain = adjusted(logits[0], bias=bias.items(), counts=counts, **more)
    token, logprob, *_ = sample(logits, temperature=0.0, bias=bias.items(), counts=counts, **more)
    assert plain[token[0]] >= plain.max() - 1e-4
    # The log-probability is of the model's own distribution: adjustments do not touch it.
    assert logprob[0] == pytest.approx(log_softmax(logits[0])[token[0]], abs=2e-5)


def test_minus_infinity_forbids_a_token():
    logits = _logits(0)
    best = int(logits[0].argmax())
    assert sample(logits, temperature=0.0)[0][0] == best
    assert sample(logits, temperature=0.0, bias=[(best, -np.inf)])[0][0] != best


def test_the_likeliest_tokens_come_best_first_with_their_logprobs():
    logits = _logits(5, rows=3)
    _, _, top, top_logprobs = sample(logits, logprobs=[20, 3, 1])
    for row, wanted in enumerate([20, 3, 1]):
        expected = log_softmax(logits[row])
        order = np.argsort(-expected, kind="stable")[:wanted]
        np.testing.assert_array_equal(top[row, :wanted], order)
        np.testing.assert_allclose(top_logprobs[row, :wanted], expected[order], atol=2e-5)


def test_of_equal_logits_the_lowest_id_is_greedy():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [500, 77, 900]] = 3
    assert sample(logits, temperature=0.0)[0][0] == 77


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_its_neighbours_do_not_care(poison):
    logits = _logits(9, rows=3)
    clean = sample(logits, seed=4)[0]
    logits[1, 333] = poison
    spoiled = sample(logits, seed=4)[0]
    assert spoiled.tolist() == [clean[0], -1, clean[2]]


def test_draws_follow_the_distribution():
    logits = np.full((1, VOCAB), -30, np.float32)
    logits[0, [3, 500, 1002]] = np.log([0.2, 0.5, 0.3])
    rows = np.repeat(logits, 2000, axis=0)
    tokens = sample(rows, seed=11, position=np.arange(2000))[0]
    shares = [(tokens == token).mean() for token in (3, 500, 1002)]
    np.testing.assert_allclose(shares, [0.2, 0.5, 0.3], atol=0.05)


def test_philox_gives_the_published_words():
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@native("float64(int64, int64)")
def _uniform(seed, position):
    return kernel_uniform(seed, position)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_the_kernel_s_generator_is_the_plain_one(seed, position):
    word = np.array([seed], np.uint64)
    assert _uniform(word.ctypes.data, position) == uniform(seed, position)
