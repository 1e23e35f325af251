"""Choosing a token from a row of logits: bias, penalties, temperature, cuts, and the seeded draw.

The draw walks through the kept tokens in order of their ids, until their weights exceed the uniform number's
share:
a function of (logits, parameters, seed, position) alone. `tests/gpu/reference_sampling.py` says the same
plainly.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir

from gpu.kernels import MAX_TOP_LOGPROBS, simd
from gpu.kernels import header as h
from gpu.kernels.header import word
from gpu.kernels.jit import inner
from gpu.kernels.rows import get_f32, get_i32, get_i64, put_f32
from gpu.kernels.simd import I32, I64, V8, Value, constant, emitter, load, loop, splat, store

_CHUNK = 64
"""Weights that are summed together before the draw looks at them one by one."""
_LOG2_E = np.float32(1.4426950408889634)
_FORBIDDEN = np.float32(-1e30)
_COOLEST = np.float32(1e-6)
"""A temperature below it would overflow; it is greedy long before."""
_TOP = MAX_TOP_LOGPROBS


@emitter("ii")
def _put_i32(b: ir.IRBuilder, address: Value, value: Value) -> None:
    store(b, b.trunc(value, I32), address)


@emitter("ii", "float32")
def _largest(b: ir.IRBuilder, x: Value, count: Value) -> Value:
    """Of `count` fp32, a multiple of 8, at least 8."""
    top = simd.cell(b, constant(V8, 0.0))
    b.store(load(b, x, 0, V8), top)
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        b.store(simd.maximum(b, load(b, x, at, V8), b.load(top)), top)
    return simd.fold(b, b.load(top), simd.maximum)


@emitter("ii", "float32")
def _spoiled(b: ir.IRBuilder, x: Value, count: Value) -> Value:
    """0 if all are finite, else not a number."""
    total = simd.cell(b, constant(V8, 0.0))
    b.store(constant(V8, 0.0), total)
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        b.store(b.fadd(b.fmul(load(b, x, at, V8), constant(V8, 0.0)), b.load(total)), total)
    return simd.fold(b, b.load(total), simd.add)


@emitter("iiiff", "float32")
def _weigh(b: ir.IRBuilder, x: Value, target: Value, count: Value, peak: Value, factor: Value) -> Value:
    """Write 2**((x - peak) · factor) to the target; returns their sum. `count` is a multiple of 8."""
    total = simd.cell(b, constant(V8, 0.0))
    b.store(constant(V8, 0.0), total)
    high, steep = splat(b, peak, 8), splat(b, factor, 8)
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        weight = simd.exp2(b, b.fmul(b.fsub(load(b, x, at, V8), high), steep))
        store(b, weight, target, at)
        b.store(b.fadd(weight, b.load(total)), total)
    return simd.fold(b, b.load(total), simd.add)


@inner
def uniform(seed_address, position):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Philox 4x32-10's first word as a number in [0, 1): `gpu.philox.uniform`, compiled."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    k0, k1 = np.uint64(get_i32(seed_address)) & mask, np.uint64(get_i32(seed_address + 4)) & mask
    c0, c1, c2, c3 = np.uint64(position) & mask, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        low, high = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (high >> shift) ^ c1 ^ k0, high & mask, (low >> shift) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.float64(c0 >> np.uint64(8)) * 2.0**-24


@inner
def _first_largest(x, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Index of the largest; the lowest of equals."""
    best, where = get_f32(x), 0
    for at in range(0, count, 16):
        top = _largest(x + 4 * at, 16)
        if top > best:
            best, where = top, at
    while get_f32(x + 4 * where) != best:
        where += 1
    return where


@inner
def _note_likeliest(x, vocab, wanted, log_total, tokens, logprobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The `wanted` largest, by insertion: few get past the first comparison."""
    kept = 0
    for token in range(vocab):
        value = get_f32(x + 4 * token)
        if kept == wanted and value <= get_f32(logprobs + 4 * (kept - 1)):
            continue
        if kept < wanted:
            kept += 1
        at = kept - 1
        while at > 0 and get_f32(logprobs + 4 * (at - 1)) < value:
            put_f32(logprobs + 4 * at, get_f32(logprobs + 4 * (at - 1)))
            _put_i32(tokens + 4 * at, get_i32(tokens + 4 * (at - 1)))
            at -= 1
        put_f32(logprobs + 4 * at, value)
        _put_i32(tokens + 4 * at, token)
    for at in range(kept):
        put_f32(logprobs + 4 * at, get_f32(logprobs + 4 * at) - log_total)


@inner
def _adjust(header, i, x, saved):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Bias and penalties, in place; the logits as they were go to `saved`. Returns how many went there."""
    kept = 0
    starts, tokens = word(header, h.BIAS_STARTS), word(header, h.BIAS_TOKENS)
    for j in range(get_i32(starts + 4 * i), get_i32(starts + 4 * i + 4)):
        place = x + 4 * get_i32(tokens + 4 * j)
        put_f32(saved + 4 * kept, get_f32(place))
        kept += 1
        put_f32(place, max(_FORBIDDEN, get_f32(place) + get_f32(word(header, h.BIAS_VALUES) + 4 * j)))
    repetition = get_f32(word(header, h.REPETITION) + 4 * i)
    presence, frequency = (
        get_f32(word(header, h.PRESENCE) + 4 * i),
        get_f32(word(header, h.FREQUENCY) + 4 * i),
    )
    starts, tokens = word(header, h.PENALTY_STARTS), word(header, h.PENALTY_TOKENS)
    for j in range(get_i32(starts + 4 * i), get_i32(starts + 4 * i + 4)):
        place = x + 4 * get_i32(tokens + 4 * j)
        value = get_f32(place)
        put_f32(saved + 4 * kept, value)
        kept += 1
        value = value / repetition if value > 0 else value * repetition
        count = get_i32(word(header, h.PENALTY_COUNTS) + 4 * j)
        if count > 0:
            value -= np.float32(count) * frequency + presence
        put_f32(place, value)
    return kept


@inner
def _restore(header, i, x, saved, kept):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Undo `_adjust`, last change first."""
    starts, tokens = word(header, h.PENALTY_STARTS), word(header, h.PENALTY_TOKENS)
    for j in range(get_i32(starts + 4 * i + 4) - 1, get_i32(starts + 4 * i) - 1, -1):
        kept -= 1
        put_f32(x + 4 * get_i32(tokens + 4 * j), get_f32(saved + 4 * kept))
    starts, tokens = word(header, h.BIAS_STARTS), word(header, h.BIAS_TOKENS)
    for j in range(get_i32(starts + 4 * i + 4) - 1, get_i32(starts + 4 * i) - 1, -1):
        kept -= 1
        put_f32(x + 4 * get_i32(tokens + 4 * j), get_f32(saved + 4 * kept))


@inner
def _sift(weights, heap, count, at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Let the token at `at` sink in a heap whose root is the heaviest; of equals the lowest id."""
    token = get_i32(heap + 4 * at)
    weight = get_f32(weights + 4 * token)
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        below = get_i32(heap + 4 * child)
        heavy = get_f32(weights + 4 * below)
        if child + 1 < count:
            other = get_i32(heap + 4 * child + 4)
            weight_of_other = get_f32(weights + 4 * other)
            if weight_of_other > heavy or (weight_of_other == heavy and other < below):
                child, below, heavy = child + 1, other, weight_of_other
        if weight > heavy or (weight == heavy and token < below):
            break
        _put_i32(heap + 4 * at, below)
        at = child
    _put_i32(heap + 4 * at, token)


@inner
def _collect(weights, vocab, least, heap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Ids of the tokens that weigh at least `least`, in order; how many, and their sum."""
    count, mass = 0, 0.0
    for at in range(0, vocab, 16):
        if _largest(weights + 4 * at, 16) < least:
            continue
        for token in range(at, min(at + 16, vocab)):
            weight = get_f32(weights + 4 * token)
            if weight >= least:
                _put_i32(heap + 4 * count, token)
                count += 1
                mass += weight
    return count, mass


@inner
def _heavy(weights, vocab, total, top_k, top_p, min_p, heap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Collect enough tokens for the cuts, the heavy ones alone if they suffice: nearly always they do."""
    floor = np.float32(2.0**-6)
    while True:
        count, mass = _collect(weights, vocab, max(floor, min_p), heap)
        if floor == 0 or floor <= min_p or (count >= top_k if top_k else mass >= top_p * total):
            return count
        floor = np.float32(floor * floor) if floor > 1e-12 else np.float32(0)


@inner
def _cut(weights, vocab, total, top_k, top_p, min_p, heap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The lightest token that top_k, top_p and min_p keep, as (weight, id), and the sum of all that are kept.

    First top_k and min_p; top_p's share is of what those leave.
    """
    if min_p > 0:
        _, total = _collect(weights, vocab, min_p, heap)
    count = _heavy(weights, vocab, total, top_k, top_p, min_p, heap)
    for at in range(count // 2 - 1, -1, -1):
        _sift(weights, heap, count, at)
    last = max(0, count - top_k) if top_k else 0
    for left in range(count, last, -1):
        _pop(weights, heap, left)
    if top_k:
        total = 0.0
        for at in range(count - 1, last - 1, -1):
            total += get_f32(weights + 4 * get_i32(heap + 4 * at))
    kept, token = 0.0, get_i32(heap + 4 * count - 4)
    for at in range(count - 1, last - 1, -1):
        token = get_i32(heap + 4 * at)
        kept += get_f32(weights + 4 * token)
        if kept >= top_p * total:
            break
    return get_f32(weights + 4 * token), token, kept


@inner
def _pop(weights, heap, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The root goes behind the heap, which is one smaller then."""
    root = get_i32(heap)
    _put_i32(heap, get_i32(heap + 4 * count - 4))
    _sift(weights, heap, count - 1, 0)
    _put_i32(heap + 4 * count - 4, root)


@inner
def _walk(weights, vocab, target, cut_weight, cut_token):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The token at which the kept weights, added up by id, exceed `target`.

    The last kept one at the latest.
    """
    passed, last = 0.0, cut_token
    for at in range(0, vocab, 16):
        if _largest(weights + 4 * at, 16) < cut_weight:
            continue
        for token in range(at, min(at + 16, vocab)):
            weight = get_f32(weights + 4 * token)
            if weight > cut_weight or (weight == cut_weight and token <= cut_token):
                passed += weight
                last = token
                if passed > target:
                    return token
    return last


@inner
def _walk_all(weights, vocab, padded, share):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The same when every token is kept: whole chunks are passed over by their sums."""
    total = 0.0
    for at in range(0, padded, 16):
        total += _sixteen(weights + 4 * at)
    target, passed = share * total, 0.0
    for at in range(0, padded, 16):
        inside = _sixteen(weights + 4 * at)
        if passed + inside > target:
            for token in range(at, min(at + 16, vocab)):
                passed += get_f32(weights + 4 * token)
                if passed > target:
                    return token
        else:
            passed += inside
    return vocab - 1


@emitter("i", "float32")
def _sixteen(b: ir.IRBuilder, x: Value) -> Value:
    return simd.fold(b, b.fadd(load(b, x, 0, V8), load(b, x, 32, V8)), simd.add)


@inner
def _pick(header, i, x, vocab, padded, weights, heap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    temperature = get_f32(word(header, h.TEMPERATURE) + 4 * i)
    top = _first_largest(x, padded)
    if temperature <= 0:
        return top
    _weigh(x, weights, padded, get_f32(x + 4 * top), _LOG2_E / max(temperature, _COOLEST))
    for token in range(vocab, padded):
        put_f32(weights + 4 * token, np.float32(0))
    share = uniform(word(header, h.SEED) + 8 * i, get_i32(word(header, h.POSITION) + 4 * i))
    top_k = get_i32(word(header, h.TOP_K) + 4 * i)
    top_p, min_p = get_f32(word(header, h.TOP_P) + 4 * i), get_f32(word(header, h.MIN_P) + 4 * i)
    if (top_k == 0 or top_k >= vocab) and top_p >= 1 and min_p <= 0:
        return _walk_all(weights, vocab, padded, share)
    total = 0.0
    for at in range(0, padded, 16):
        total += _sixteen(weights + 4 * at)
    weight, token, kept = _cut(weights, vocab, total, min(top_k, vocab), top_p, min_p, heap)
    return _walk(weights, vocab, share * kept, weight, token)


def draw(args: int, chunk: int, thread: int) -> None:
    """One sample.

    Arguments: header, logits, stride, vocabulary, the same padded, scratch of a thread, its bytes, then where
    tokens, logprobs, likeliest tokens and their logprobs go.
    """
    header = get_i64(args)
    x = get_i64(args + 8) + chunk * get_i64(args + 16)
    vocab, padded = get_i64(args + 24), get_i64(args + 32)
    weights = get_i64(args + 40) + thread * get_i64(args + 48)
    heap, saved = weights + 4 * padded, weights + 8 * padded
    token_out, logprob_out = get_i64(args + 56) + 4 * chunk, get_i64(args + 64) + 4 * chunk
    for token in range(vocab, padded):
        put_f32(x + 4 * token, _FORBIDDEN)
    if _spoiled(x, padded) != 0:
        _put_i32(token_out, -1)
        return
    peak = _largest(x, padded)
    log_total = np.float32(peak + math.log(_weigh(x, weights, padded, peak, _LOG2_E)))
    wanted = get_i32(word(header, h.LOGPROBS) + 4 * chunk)
    if wanted > 0:
        tops = 4 * chunk * _TOP
        _note_likeliest(x, vocab, wanted, log_total, get_i64(args + 72) + tops, get_i64(args + 80) + tops)
    kept = _adjust(header, chunk, x, saved)
    token = _pick(header, chunk, x, vocab, padded, weights, heap)
    _restore(header, chunk, x, saved, kept)
    _put_i32(token_out, token)
    put_f32(logprob_out, get_f32(x + 4 * token) - log_total)
