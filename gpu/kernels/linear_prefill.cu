// A linear layer for many tokens: bound by the matrix units.
//
//   x (tokens, columns) bf16, weight (rows, columns) bf16 or quantised, out (tokens, rows); operations: 2 * rows *
//   columns * tokens; bytes: (rows * columns * tokens / 128 + tokens * columns * rows / 128) * 2 through the L2 cache
//   A block of 8 warps owns 128 rows and 128 tokens; a warp 32 rows and 64 tokens. Activations come through shared
//   memory, 128 columns at a time, copied while the ones before are used; weights go straight to registers.
//   grid (rows / 128, tokens / 128), block 256, shared 65,536 bytes. Sums in linear.cuh's order, so that a token's
//   result is bit for bit that of linear_decode. Reference: float64 over the dequantised weights.
#include "linear.cuh"

constexpr int TILE_ROWS = 128, TILE_TOKENS = 128, SPAN = 128, WARP_ROWS = 32, WARP_TOKENS = 64;
constexpr int SPAN_BLOCKS = SPAN / BLOCK, TILES = WARP_TOKENS / 8;

// Begin copying columns [begin, begin + 128) of the block's tokens: (block of 32, token, 4 lanes).
DEVICE void fetch_activations(const int* step, Word4* to, const bf16* x, int columns, int begin) {
    int count = step[STEP_ROWS], first = blockIdx.y * TILE_TOKENS;
    for (int i = threadIdx.x; i < SPAN_BLOCKS * TILE_TOKENS * 4; i += blockDim.x) {
        int token = first + i / 4 % TILE_TOKENS, column = begin + i / (4 * TILE_TOKENS) * BLOCK + i % 4 * 8;
        bool valid = token < count && column < columns;
        copy_later(to + i, x + (valid ? static_cast<size_t>(token) * columns + column : 0), valid);
    }
    commit_copies();
}

template <class W>
DEVICE void linear_prefill(const int* step, Weights weights, const bf16* x, void* out, int output) {
    int count = step[STEP_ROWS], first_token = blockIdx.y * TILE_TOKENS;
    if (first_token >= count) return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int first = blockIdx.x * TILE_ROWS + warp % 4 * WARP_ROWS, warp_token = warp / 4 * WARP_TOKENS;
    Word4* stages = reinterpret_cast<Word4*>(shared_memory());
    constexpr int STAGE = SPAN_BLOCKS * TILE_TOKENS * 4;
    float total[2][TILES][4] = {}, sum[2][TILES][4] = {};
    fetch_activations(step, stages, x, weights.columns, 0);
    for (int begin = 0, stage = 0; begin < weights.columns; begin += SPAN, stage ^= 1) {
        fetch_activations(step, stages + (stage ^ 1) * STAGE, x, weights.columns, begin + SPAN);
        wait_copies<1>();
        __syncthreads();
        const Word4* here = stages + stage * STAGE + (warp_token + lane / 4) * 4 + lane % 4;
        int end = min(begin + SPAN, weights.columns);
        add_columns<W, 2, TILES>(sum, weights, first, begin, end, [&](int tile, int block) {
            return here[(block % SPAN_BLOCKS * TILE_TOKENS + tile * 8) * 4];
        });
        __syncthreads();  // the next round copies over what was just read
        if (end % PIECE && end < weights.columns) continue;
#pragma unroll
        for (int i = 0; i < 2 * TILES * 4; i++) {
            float& part = sum[i / (4 * TILES)][i / 4 % TILES][i % 4];
            total[i / (4 * TILES)][i / 4 % TILES][i % 4] += part;
            part = 0.0f;
        }
    }
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < 2 * TILES * 4; i++) {
        int m = i / (4 * TILES), tile = i / 4 % TILES, part = i % 4;
        int token = first_token + warp_token + tile * 8 + lane % 4 * 2 + part % 2;
        float up = part < 2 ? total[m][tile][part % 2 + 2] : 0.0f;
        int row = first + m * 16 + part / 2 * 8 + lane / 4;
        if (token < count) store(out, output, weights.rows, token, row, total[m][tile][part], up);
    }
}

#define LINEAR(NAME, KIND)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_##NAME##_prefill(                                   \
        const int* step, const Word4* data, const unsigned short* scales, int rows, int columns, const bf16* x,     \
        void* out, int output) {                                                                                    \
        linear_prefill<KIND>(step, Weights{data, scales, rows, columns}, x, out, output);                           \
    }

LINEAR(bf16, Bf16)
LINEAR(q8_0, Q8_0)
LINEAR(q4_0, Q4_0)
LINEAR(q4_1, Q4_1)
