// Causal attention over the paged cache: the part that decoding and prefill share.
//
//   rows: the query heads of a group and the tokens of a sequence laid end to end, row = token * group + head; all of
//   them read the same keys. A warp owns 16 rows. Odd groups and long ones need no case of their own.
//   keys, values (blocks, kv_heads, 16, D) bf16; a table names a sequence's blocks in order.
//
// One order of summation, whoever runs it: keys go by in spans of 32 with an online softmax in fp32; 128 keys make a
// piece; pieces are folded together in order. A row that may not see a key gives it the weight zero, and a span whose
// keys are all hidden leaves the row's sums as they are, bit for bit. So a token's result is the same whether it was
// decoded alone, or computed with its prompt, however that was cut.
#pragma once
#include "common.cuh"
#include "step.cuh"

constexpr int SPAN = 32, PIECE = 128, ROWS = 16;

// Rows of a staged tile are padded so that lanes which read together hit different banks.
template <int D>
constexpr int KEY_STRIDE = D % 64 == 0 ? D + 32 : D;
template <int D>
constexpr int VALUE_STRIDE = D + 8;
template <int D>
constexpr int STAGE = SPAN * (KEY_STRIDE<D> + VALUE_STRIDE<D>);  // elements

struct Cache {
    const bf16* keys;
    const bf16* values;
    const int* table;  // this sequence's
    int kv_heads, head;
};

// Begin copying keys [begin, begin + 32) and their values to `stage`; zeros from `end` on, for a slot nobody wrote may
// hold NaN, and zero times NaN is NaN.
template <int D>
DEVICE void fetch_span(bf16* stage, const Cache& cache, int begin, int end) {
    constexpr int PARTS = D / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < SPAN * PARTS; i += blockDim.x) {
        int key = begin + i / PARTS, part = i % PARTS * 8;
        bool valid = key < end;
        size_t at = 0;
        if (valid) {
            size_t block = cache.table[key / KV_BLOCK];
            at = ((block * cache.kv_heads + cache.head) * KV_BLOCK + key % KV_BLOCK) * D + part;
        }
        copy_later(stage + i / PARTS * KEY_STRIDE<D> + part, cache.keys + at, valid);
        copy_later(stage + SPAN * KEY_STRIDE<D> + i / PARTS * VALUE_STRIDE<D> + part, cache.values + at, valid);
    }
    commit_copies();
}

// A warp's 16 rows: lane (g, t) holds of rows g and g + 8 the dimensions 8i + 2t and 8i + 2t + 1.
template <int D>
struct RowTile {
    unsigned query[D / 32][8];
    float out[D / 8][4];
    float top[2], sum[2];  // largest score and sum of weights, by row; `sum` is this lane's share
    int limit[2];          // keys [0, limit) are visible
};

template <int D>
DEVICE void begin_piece(RowTile<D>& tile) {
#pragma unroll
    for (int i = 0; i < D / 8 * 4; i++) tile.out[i / 4][i % 4] = 0.0f;
    for (int half = 0; half < 2; half++) tile.top[half] = -infinity(), tile.sum[half] = 0.0f;
}

// Load the queries of rows `first`.. of the sequence whose rows begin at `token`; `rows` = tokens * group of them exist.
template <int D>
DEVICE void load_queries(RowTile<D>& tile, const bf16* queries, int first, int rows, int group, int heads, int head,
                         int token, int position) {
    int lane = threadIdx.x % WARP;
    for (int half = 0; half < 2; half++) {
        int row = first + half * 8 + lane / 4;
        bool exists = row < rows;
        if (!exists) row = rows - 1;
        size_t at = (static_cast<size_t>(token + row / group) * heads + head * group + row % group) * D;
        const Word4* from = reinterpret_cast<const Word4*>(queries + at) + lane % 4;
        tile.limit[half] = exists ? position + row / group + 1 : 0;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            Word4 words = from[i * 4];
            tile.query[i][half] = words.x, tile.query[i][2 + half] = words.y;
            tile.query[i][4 + half] = words.z, tile.query[i][6 + half] = words.w;
        }
    }
}

DEVICE float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

DEVICE float quad_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// scores[j] = queries . keys 8j..8j+7 of the span, in powers of two; hidden ones -inf.
template <int D>
DEVICE void score_span(float (&scores)[SPAN / 8][4], const RowTile<D>& tile, const bf16* keys, int begin, float scale) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < SPAN / 8; j++) {
        const Word4* key = reinterpret_cast<const Word4*>(keys + (j * 8 + lane / 4) * KEY_STRIDE<D>) + lane % 4;
        for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            Word4 words = key[i * 4];
            const unsigned* q = tile.query[i];
            const unsigned front[4] = {q[0], q[1], q[2], q[3]}, back[4] = {q[4], q[5], q[6], q[7]};
            mma(scores[j], front, words.x, words.y);
            mma(scores[j], back, words.z, words.w);
        }
        for (int i = 0; i < 4; i++) {
            bool visible = begin + j * 8 + lane % 4 * 2 + i % 2 < tile.limit[i / 2];
            scores[j][i] = visible ? scores[j][i] * scale : -infinity();
        }
    }
}

// Turn scores into weights, and bring what was summed so far to the new largest score.
template <int D>
DEVICE void soften(float (&scores)[SPAN / 8][4], RowTile<D>& tile) {
    float shrink[2];
    for (int half = 0; half < 2; half++) {
        float top = -infinity();
        for (int j = 0; j < SPAN / 8; j++) top = fmaxf(top, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
        top = fmaxf(tile.top[half], quad_max(top));
        float level = top == -infinity() ? 0.0f : top;  // nothing seen yet: every weight below is exp2(-inf) = 0
        shrink[half] = exp2f(tile.top[half] - level);
        if (tile.top[half] == top) shrink[half] = 1.0f;
        tile.top[half] = top;
        tile.sum[half] *= shrink[half];
        for (int j = 0; j < SPAN / 8; j++)
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                scores[j][i] = exp2f(scores[j][i] - level);
                tile.sum[half] += scores[j][i];
            }
    }
    if (!__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;  // times one changes no bit
#pragma unroll
    for (int i = 0; i < D / 8 * 4; i++) tile.out[i / 4][i % 4] *= shrink[i % 4 / 2];
}

// out += weights * values.
template <int D>
DEVICE void weigh_values(RowTile<D>& tile, const float (&weights)[SPAN / 8][4], const bf16* values) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < SPAN / 16; half++) {
        const float(&left)[4] = weights[2 * half];
        const float(&right)[4] = weights[2 * half + 1];
        const unsigned packed[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                    pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
        const bf16* row = values + (half * 16 + lane % 16) * VALUE_STRIDE<D> + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            unsigned words[4];
            load_transposed(words, row + i * 16);
            mma(tile.out[2 * i], packed, words[0], words[1]);
            mma(tile.out[2 * i + 1], packed, words[2], words[3]);
        }
    }
}

template <int D>
DEVICE void attend_span(RowTile<D>& tile, const bf16* stage, int begin, float scale) {
    float scores[SPAN / 8][4];
    score_span<D>(scores, tile, stage, begin, scale);
    soften<D>(scores, tile);
    weigh_values<D>(tile, scores, stage + SPAN * KEY_STRIDE<D>);
}

// How a piece joins the pieces before it. `top` -inf: nothing before.
struct Fold {
    float top, before, piece;  // the new largest score; what to multiply each side with

    DEVICE Fold of(float top, float piece_top) {
        float larger = fmaxf(top, piece_top);
        return Fold{larger, exp2f(top - larger), exp2f(piece_top - larger)};
    }
    __device__ __forceinline__ float join(float a, float b) const { return fmaf(a, before, b * piece); }
};
