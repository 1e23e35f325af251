// out = x @ weight.T: the part that small and large batches share.
//
// One order of summation, whatever the batch: the columns are cut in pieces of 512; within a piece `mma` adds 16 at a
// time, in order, in fp32 (quantised: each block of 32 on its own, scaled, then added); the pieces are then added in
// order. A weight row is a row of the product and a token a column of it, so no token's sum sees another's.
#pragma once
#include "step.cuh"
#include "weights.cuh"

constexpr int PIECE = 512;  // columns; small enough that several warps can share a row at batch 1
constexpr unsigned ONES = 0x3f803f80u;

enum Output { OUT_BF16, OUT_F32, OUT_SWIGLU };  // swiglu: rows 16i..16i+7 are gates, the next 8 their ups

struct Weights {
    const Word4* data;             // (rows, chunks, 4 lanes)
    const unsigned short* scales;  // (rows, chunks * BLOCKS, 1 or 2)
    int rows, columns;
};

// The row of the matrix that this lane's row `g` or `g + 8` of a 16-row tile is. What a row past the end gives is not
// stored.
DEVICE size_t lane_row(const Weights& weights, int tile_row, int half) {
    int row = tile_row + half * 8 + threadIdx.x % WARP / 4;
    return row < weights.rows ? row : weights.rows - 1;
}

// sum += the products of one block of 32 columns, for M * 16 weight rows and TILES * 8 tokens.
template <class W, int M, int TILES, class Tokens>
DEVICE void add_block(float (&sum)[M][TILES][4], const Weights& weights, int first, const Word4 (&share)[M][2], int chunks,
                      int block, Tokens tokens) {
    unsigned words[M][2][4];
    float scale[M][2], offset[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            W::unpack(words[m][half], share[m][half], block % W::BLOCKS);
            size_t at = lane_row(weights, first + m * 16, half) * chunks * W::BLOCKS + block;
            scale[m][half] = W::scale(weights.scales, at);
            offset[m][half] = W::offset(weights.scales, at);
        }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        Word4 x = tokens(tile, block);
        float x_sum[4] = {};
        if (W::OFFSET) {
            const unsigned ones[4] = {ONES, ONES, ONES, ONES};
            mma(x_sum, ones, x.x, x.y);
            mma(x_sum, ones, x.z, x.w);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            auto& low = words[m][0];
            auto& high = words[m][1];
            const unsigned front[4] = {low[0], high[0], low[1], high[1]}, back[4] = {low[2], high[2], low[3], high[3]};
            float(&to)[4] = sum[m][tile];
            if (!W::SCALED) {
                mma(to, front, x.x, x.y);
                mma(to, back, x.z, x.w);
                continue;
            }
            float part[4] = {};
            mma(part, front, x.x, x.y);
            mma(part, back, x.z, x.w);
            for (int i = 0; i < 4; i++) {
                to[i] = fmaf(scale[m][i / 2], part[i], to[i]);
                if (W::OFFSET) to[i] = fmaf(offset[m][i / 2], x_sum[i], to[i]);
            }
        }
    }
}

// sum += weights[columns begin..end) * tokens. `begin` lies on a chunk's border. `tokens(tile, block)` gives a lane's
// eight activations, 8t.., of token 8 * tile + g in that block of 32.
template <class W, int M, int TILES, class Tokens>
DEVICE void add_columns(float (&sum)[M][TILES][4], const Weights& weights, int first, int begin, int end, Tokens tokens) {
    // Few tokens: loads for 64 bytes of each row under way at once. Many: the products hide them, and code stays small.
    constexpr int AHEAD = M > 1 ? 1 : W::BLOCKS == 1 ? 4 : 2, UNROLL = M > 1 ? 1 : W::BLOCKS;
    int chunks = chunks_of<W>(weights.columns), last = (end - 1) / (BLOCK * W::BLOCKS);
#pragma unroll 1
    for (int first_chunk = begin / (BLOCK * W::BLOCKS); first_chunk <= last; first_chunk += AHEAD) {
        Word4 share[AHEAD][M][2];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            for (int m = 0; m < M; m++)
                for (int half = 0; half < 2; half++) {
                    size_t row = lane_row(weights, first + m * 16, half);
                    share[a][m][half] = load_chunk(weights.data, row, chunks, min(first_chunk + a, last), threadIdx.x % 4);
                }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll UNROLL
            for (int b = 0; b < W::BLOCKS; b++) {
                int block = (first_chunk + a) * W::BLOCKS + b;
                if (block * BLOCK >= end) break;
                add_block<W, M, TILES>(sum, weights, first, share[a], chunks, block, tokens);
            }
        }
    }
}

// How many tokens there are, and which row of activations a token is: all rows, or those whose logits are wanted.
DEVICE int token_count(const int* step, int selected) { return step[selected ? STEP_SAMPLES : STEP_ROWS]; }
DEVICE size_t token_row(const int* step, int selected, int token) {
    return selected ? step_ints(step, STEP_LOGIT_ROWS)[token] : token;
}

DEVICE float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// Stores one sum, or, for swiglu, a gate's and its up's together; `up` is the sum eight rows further on.
DEVICE void store(void* out, int output, int rows, size_t token, int row, float value, float up) {
    if (row >= rows) return;
    if (output == OUT_F32) {
        static_cast<float*>(out)[token * rows + row] = value;
    } else if (output == OUT_BF16) {
        static_cast<bf16*>(out)[token * rows + row] = to_bf16(value);
    } else if (row % 16 < 8) {
        static_cast<bf16*>(out)[token * (rows / 2) + row / 16 * 8 + row % 16] = to_bf16(silu(value) * up);
    }
}
