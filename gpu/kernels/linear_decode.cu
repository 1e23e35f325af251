// A linear layer for few tokens: the weights stream past once, straight from memory to the tensor cores.
//
//   x (tokens, columns) bf16, weight (rows, columns) bf16 or Q8_0, Q4_0, Q4_1 (weights.cuh), out (tokens, rows)
//   bytes: rows * columns * 2 (bf16), 34/32 (q8_0), 18/32 (q4_0), 20/32 (q4_1), and a little   operations: 2 * rows *
//   columns * tokens. Bound by memory up to about 200 tokens on an H100.
//   A block owns 16 rows and TILES * 8 tokens; its warps take pieces of the columns in turn and add them up in order.
//   grid (rows / 16, tokens / (8 * TILES)), block 32 * warps, shared (2 * warps + 1) * TILES * 512 bytes.
//   Reference: float64 over the dequantised weights.
#include "linear.cuh"

template <class W, int TILES>
DEVICE void linear_decode(const int* step, Weights weights, const bf16* x, void* out, int output, int selected) {
    constexpr int SUMS = TILES * 4 * WARP;  // of a block, four a lane and tile
    int count = token_count(step, selected), first_token = blockIdx.y * TILES * 8;
    if (first_token >= count) return;
    int first = blockIdx.x * 16, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const Word4* activations[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        int token = first_token + tile * 8 + lane / 4;
        size_t row = token_row(step, selected, token < count ? token : count - 1);
        activations[tile] = reinterpret_cast<const Word4*>(x + row * weights.columns) + lane % 4;
    }
    float* total = reinterpret_cast<float*>(shared_memory());
    float* parts = total + SUMS;  // (2, warps, SUMS)
    for (int i = threadIdx.x; i < SUMS; i += blockDim.x) total[i] = 0.0f;
    int pieces = (weights.columns + PIECE - 1) / PIECE;
    for (int round = 0; round * warps < pieces; round++) {
        float* mine = parts + ((round & 1) * warps + warp) * SUMS;
        int begin = (round * warps + warp) * PIECE;
        if (begin < weights.columns) {
            float sum[1][TILES][4] = {};
            int end = min(begin + PIECE, weights.columns);
            add_columns<W, 1, TILES>(sum, weights, first, begin, end,
                                     [&](int tile, int block) { return activations[tile][block * 4]; });
#pragma unroll
            for (int i = 0; i < TILES * 4; i++) mine[i * WARP + lane] = sum[0][i / 4][i % 4];
        }
        __syncthreads();  // one a round is enough: the next writes to the other half
        const float* all = parts + (round & 1) * warps * SUMS;
        for (int w = 0; w < warps && round * warps + w < pieces; w++)
            for (int i = threadIdx.x; i < SUMS; i += blockDim.x) total[i] += all[w * SUMS + i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS; i += blockDim.x) {
        int owner = i % WARP, part = i / WARP % 4, token = first_token + i / (4 * WARP) * 8 + owner % 4 * 2 + part % 2;
        float up = part < 2 ? total[i + 2 * WARP] : 0.0f;
        if (token < count) store(out, output, weights.rows, token, first + part / 2 * 8 + owner / 4, total[i], up);
    }
}

#define LINEAR(NAME, KIND, TILES)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) linear_##NAME##_##TILES(                                      \
        const int* step, const Word4* data, const unsigned short* scales, int rows, int columns, const bf16* x,     \
        void* out, int output, int selected) {                                                                      \
        linear_decode<KIND, TILES>(step, Weights{data, scales, rows, columns}, x, out, output, selected);           \
    }
#define LINEARS(NAME, KIND) LINEAR(NAME, KIND, 1) LINEAR(NAME, KIND, 4) LINEAR(NAME, KIND, 8)

LINEARS(bf16, Bf16)
LINEARS(q8_0, Q8_0)
LINEARS(q4_0, Q4_0)
LINEARS(q4_1, Q4_1)
