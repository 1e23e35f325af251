// Numbers and sums. Every sum has one order, fixed by the shape of the data and never by the shape of the launch, so a
// row's result is the same bits in any batch. The compiler may not fuse a*b+c by itself (--fmad=false): where a fused
// multiply-add is meant, fmaf says so.
#pragma once
#include "machine.cuh"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int KV_BLOCK = 16;  // tokens in a block of the cache: gpu.blocks.BLOCK_SIZE

DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }
DEVICE bf16 to_bf16(float value) { return static_cast<bf16>(pack_bf16(value, 0.0f)); }
DEVICE float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
DEVICE float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

DEVICE float warp_sum(float value) {
    for (int lane = WARP / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(ALL_LANES, value, lane);
    return value;
}

// Sum over a block of up to 1024 threads, the same in every thread. `scratch`: 32 floats of shared memory.
DEVICE float block_sum(float value, float* scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    __syncthreads();  // the last use of scratch is over
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
