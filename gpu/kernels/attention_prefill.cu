// Attention of sequences that compute several tokens: a block of four warps goes through the keys once for 64 rows.
//
//   queries (rows, heads * D) bf16, cache (attention.cuh), out (rows, heads * D) bf16
//   operations: 4 * tokens * keys * heads * D, half of them hidden by the causal mask and skipped in whole spans
//   bytes: a sequence's keys and values once for every 64 rows of a group, through the L2 cache
//   grid (ceil(tokens * group / 64), kv_heads, sequences), block 128
//   shared: two stages of 32 keys and values, and the folded sums, 64 * D f32
//   Reference: float64, test_attention.py
#include "attention.cuh"

constexpr int WARPS = 4;

// Fold a finished piece into the row's totals, in shared memory: (D / 8 * 4, 32 lanes) a warp.
template <int D>
DEVICE void fold_piece(const RowTile<D>& tile, float* totals, float (&top)[2], float (&sum)[2]) {
    int lane = threadIdx.x % WARP;
    float piece_sum[2] = {quad_sum(tile.sum[0]), quad_sum(tile.sum[1])};
    for (int half = 0; half < 2; half++) {
        if (tile.top[half] == -infinity()) continue;  // this row sees nothing of the piece
        Fold fold = Fold::of(top[half], tile.top[half]);
        sum[half] = fold.join(sum[half], piece_sum[half]);
        top[half] = fold.top;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            for (int j = 2 * half; j < 2 * half + 2; j++) {
                float& total = totals[(i * 4 + j) * WARP + lane];
                total = fold.join(total, tile.out[i][j]);
            }
    }
}

template <int D>
DEVICE void prefill(const int* step, const bf16* queries, const bf16* keys, const bf16* values, int heads, int kv_heads,
                    float scale, bf16* out) {
    const int* span = step_ints(step, STEP_SPANS) + blockIdx.z * 3;
    if (blockIdx.z >= static_cast<unsigned>(step[STEP_SEQUENCES])) return;
    if (step_ints(step, STEP_PIECES)[blockIdx.z] >= 0) return;  // attention_decode's
    int group = heads / kv_heads, rows = span[1] * group, block_first = blockIdx.x * WARPS * ROWS;
    if (block_first >= rows) return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = block_first + warp * ROWS;
    int last = min(block_first + WARPS * ROWS, rows) - 1, end = span[2] + last / group + 1;
    int warp_last = min(first + ROWS, rows) - 1, warp_end = first < rows ? span[2] + warp_last / group + 1 : 0;
    Cache cache{keys, values, step_ints(step, STEP_TABLES) + blockIdx.z * step[STEP_COLUMNS], kv_heads,
                static_cast<int>(blockIdx.y)};
    bf16* stages = reinterpret_cast<bf16*>(shared_memory());
    float* totals = reinterpret_cast<float*>(stages + 2 * STAGE<D>) + warp * ROWS * D;
    float top[2] = {-infinity(), -infinity()}, sum[2] = {};
    for (int i = 0; i < ROWS * D / WARP; i++) totals[i * WARP + lane] = 0.0f;
    fetch_span<D>(stages, cache, 0, end);
    RowTile<D> tile;
    load_queries<D>(tile, queries, first, rows, group, heads, blockIdx.y, span[0], span[2]);
    begin_piece<D>(tile);
    for (int at = 0, stage = 0; at < end; at += SPAN, stage ^= 1) {
        fetch_span<D>(stages + (stage ^ 1) * STAGE<D>, cache, at + SPAN, end);
        wait_copies<1>();
        __syncthreads();
        if (at < warp_end) attend_span<D>(tile, stages + stage * STAGE<D>, at, scale);
        __syncthreads();
        if ((at + SPAN) % PIECE && at + SPAN < end) continue;
        fold_piece<D>(tile, totals, top, sum);
        begin_piece<D>(tile);
    }
    wait_copies<0>();
    for (int half = 0; half < 2; half++) {
        int row = first + half * 8 + lane / 4;
        if (row >= rows) continue;
        size_t at = (static_cast<size_t>(span[0] + row / group) * heads + blockIdx.y * group + row % group) * D;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            for (int j = 0; j < 2; j++)
                out[at + i * 8 + lane % 4 * 2 + j] = to_bf16(totals[(i * 4 + 2 * half + j) * WARP + lane] / sum[half]);
    }
}

#define PREFILL(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) attention_prefill_##D(                                        \
        const int* step, const bf16* queries, const bf16* keys, const bf16* values, int heads, int kv_heads,        \
        float scale, bf16* out) {                                                                                   \
        prefill<D>(step, queries, keys, values, heads, kv_heads, scale, out);                                       \
    }

PREFILL(32)
PREFILL(64)
PREFILL(96)
PREFILL(128)
