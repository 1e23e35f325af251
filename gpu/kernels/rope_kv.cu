// Queries, keys and values on their way: bias, norm per head, rotation by position, keys and values into the cache.
//
//   qkv (rows, (heads + 2 * kv_heads) * D) bf16; bias the same width f32, or none; q_norm, k_norm (D,) f32, or none
//   cosines, sines (positions, D / 2) f32: made on the host in double, for a fast sine is wrong at large angles
//   queries (rows, heads * D) bf16; keys, values (blocks, kv_heads, 16, D) bf16
//   bytes: rows * ((heads + 2 * kv_heads) * D * 4 + D * 4)     operations: about 6 a value
//   A warp for each head of each row; a lane turns pairs lane, lane + 32, … Reference: float64, test_rope_kv.py
#include "common.cuh"
#include "step.cuh"

constexpr int MAX_PAIRS = 2;  // of a lane: heads of up to 128

extern "C" __global__ void __launch_bounds__(128) rope_kv(
    const int* step, const bf16* __restrict__ qkv, const float* bias, const float* q_norm, const float* k_norm, float eps,
    const float* __restrict__ cosines, const float* __restrict__ sines, int heads, int kv_heads, int head_dim,
    int interleaved, bf16* __restrict__ queries, bf16* __restrict__ keys, bf16* __restrict__ values) {
    int all = heads + 2 * kv_heads, lane = threadIdx.x % WARP;
    int head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.x;
    if (row >= step[STEP_ROWS] || head >= all) return;
    int half = head_dim / 2;
    const bf16* from = qkv + (static_cast<size_t>(row) * all + head) * head_dim;
    float first[MAX_PAIRS], second[MAX_PAIRS], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_PAIRS; i++) {
        int pair = lane + i * WARP;
        if (pair >= half) break;
        int a = interleaved ? 2 * pair : pair, b = interleaved ? 2 * pair + 1 : pair + half;
        first[i] = to_float(from[a]) + (bias ? bias[head * head_dim + a] : 0.0f);
        second[i] = to_float(from[b]) + (bias ? bias[head * head_dim + b] : 0.0f);
        squares = fmaf(first[i], first[i], fmaf(second[i], second[i], squares));
    }
    bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const float* norm = is_value ? nullptr : is_query ? q_norm : k_norm;
    float scale = norm ? 1.0f / sqrtf(warp_sum(squares) / head_dim + eps) : 1.0f;
    size_t turn = static_cast<size_t>(step_ints(step, STEP_POSITIONS)[row]) * half;
    int slot = step_ints(step, STEP_SLOTS)[row], kv_head = is_value ? head - heads - kv_heads : head - heads;
    size_t in_cache = ((static_cast<size_t>(slot / KV_BLOCK) * kv_heads + kv_head) * KV_BLOCK + slot % KV_BLOCK) * head_dim;
    bf16* to = is_query ? queries + (static_cast<size_t>(row) * heads + head) * head_dim
                        : (is_value ? values : keys) + in_cache;
#pragma unroll
    for (int i = 0; i < MAX_PAIRS; i++) {
        int pair = lane + i * WARP;
        if (pair >= half) break;
        int a = interleaved ? 2 * pair : pair, b = interleaved ? 2 * pair + 1 : pair + half;
        float x = first[i], y = second[i];
        if (norm) x = x * scale * norm[a], y = y * scale * norm[b];
        float cosine = is_value ? 1.0f : cosines[turn + pair], sine = is_value ? 0.0f : sines[turn + pair];
        to[a] = to_bf16(fmaf(x, cosine, -(y * sine)));
        to[b] = to_bf16(fmaf(x, sine, y * cosine));
    }
}
