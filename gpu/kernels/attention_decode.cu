// Attention of sequences that compute one token: a warp for each piece of 128 keys, then a fold over the pieces.
//
//   queries (rows, heads * D) bf16, cache (attention.cuh), parts (all pieces, heads, D) f32 and tops (…, heads, 2) f32:
//   a piece's largest score and sum of weights; out (rows, heads * D) bf16. The step says where a sequence's pieces
//   begin; sequences without a place are attention_prefill's.
//   bytes: keys * kv_heads * D * 4 a sequence, and keys / 128 * heads * D * 8 for the parts
//   operations: 4 * keys * heads * D. Bound by memory at any group size.
//   attention_decode: grid (pieces, kv_heads * ceil(group / 16), sequences), block 32
//   attention_fold:   grid (heads, sequences), block D rounded up to 32
//   Reference: float64, test_attention.py. The sums are attention_prefill's, bit for bit.
#include "attention.cuh"

// Where the sequence's pieces begin in the workspace, or -1: it is not this kernel's.
DEVICE int first_piece(const int* step, int sequence) {
    return sequence < step[STEP_SEQUENCES] ? step_ints(step, STEP_PIECES)[sequence] : -1;
}

template <int D>
DEVICE void decode_piece(const int* step, const bf16* queries, const bf16* keys, const bf16* values, int heads,
                         int kv_heads, float scale, float* parts, float* tops) {
    int first_part = first_piece(step, blockIdx.z);
    if (first_part < 0) return;
    const int* span = step_ints(step, STEP_SPANS) + blockIdx.z * 3;
    int keys_seen = span[2] + 1, begin = blockIdx.x * PIECE, end = min(begin + PIECE, keys_seen);
    if (begin >= keys_seen) return;
    int group = heads / kv_heads, head = blockIdx.y % kv_heads, first = blockIdx.y / kv_heads * ROWS;
    Cache cache{keys, values, step_ints(step, STEP_TABLES) + blockIdx.z * step[STEP_COLUMNS], kv_heads, head};
    bf16* stages = reinterpret_cast<bf16*>(shared_memory());
    fetch_span<D>(stages, cache, begin, end);
    RowTile<D> tile;
    load_queries<D>(tile, queries, first, group, group, heads, head, span[0], span[2]);
    begin_piece<D>(tile);
    for (int at = begin, stage = 0; at < end; at += SPAN, stage ^= 1) {
        fetch_span<D>(stages + (stage ^ 1) * STAGE<D>, cache, at + SPAN, end);
        wait_copies<1>();
        __syncwarp();
        attend_span<D>(tile, stages + stage * STAGE<D>, at, scale);
        __syncwarp();
    }
    wait_copies<0>();
    int lane = threadIdx.x % WARP;
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(tile.sum[half]);
        int row = first + half * 8 + lane / 4;
        if (row >= group) continue;
        size_t part = static_cast<size_t>(first_part + blockIdx.x) * heads + head * group + row;
        if (lane % 4 == 0) tops[part * 2] = tile.top[half], tops[part * 2 + 1] = sum;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            float* to = parts + part * D + i * 8 + lane % 4 * 2;
            to[0] = tile.out[i][2 * half], to[1] = tile.out[i][2 * half + 1];
        }
    }
}

extern "C" __global__ void attention_fold(const int* step, const float* __restrict__ parts, const float* __restrict__ tops,
                                          int heads, int head_dim, bf16* __restrict__ out) {
    int first_part = first_piece(step, blockIdx.y);
    if (first_part < 0) return;
    const int* span = step_ints(step, STEP_SPANS) + blockIdx.y * 3;
    int dimension = threadIdx.x, used = (span[2] + PIECE) / PIECE;
    if (dimension >= head_dim) return;
    float top = -infinity(), sum = 0.0f, value = 0.0f;
    for (int piece = 0; piece < used; piece++) {
        size_t part = static_cast<size_t>(first_part + piece) * heads + blockIdx.x;
        Fold fold = Fold::of(top, tops[part * 2]);
        sum = fold.join(sum, tops[part * 2 + 1]);
        value = fold.join(value, parts[part * head_dim + dimension]);
        top = fold.top;
    }
    out[(static_cast<size_t>(span[0]) * heads + blockIdx.x) * head_dim + dimension] = to_bf16(value / sum);
}

#define DECODE(D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32) attention_decode_##D(                                          \
        const int* step, const bf16* queries, const bf16* keys, const bf16* values, int heads, int kv_heads,        \
        float scale, float* parts, float* tops) {                                                       \
        decode_piece<D>(step, queries, keys, values, heads, kv_heads, scale, parts, tops);                  \
    }

DECODE(32)
DECODE(64)
DECODE(96)
DECODE(128)
