// Fused residual and RMSNorm: hidden += delta; out = hidden / sqrt(mean(hidden^2) + eps) * weight.
//
//   hidden (rows, width) f32, delta (rows, width) bf16 or none, weight (width,) f32, out (rows, width) bf16
//   bytes: rows * width * (4 + 4 + 2 + 2) + width * 4     operations: 5 * rows * width
//   One block of 256 threads a row. Reference: float64, tests/gpu/cuda/test_add_norm.py
#include "common.cuh"
#include "step.cuh"

extern "C" __global__ void __launch_bounds__(256) add_norm(
    const int* step, float* __restrict__ hidden, const bf16* __restrict__ delta, const float* __restrict__ weight,
    bf16* __restrict__ out, int width, float eps) {
    if (blockIdx.x >= static_cast<unsigned>(step[STEP_ROWS])) return;
    float* scratch = reinterpret_cast<float*>(shared_memory());
    size_t row = static_cast<size_t>(blockIdx.x) * width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = hidden[row + i];
        if (delta) {
            value += to_float(delta[row + i]);
            hidden[row + i] = value;
        }
        squares = fmaf(value, value, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        out[row + i] = to_bf16(hidden[row + i] * scale * weight[i]);
    }
}
