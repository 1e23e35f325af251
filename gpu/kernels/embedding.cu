// Embedding: out[row] = table[token of row], dequantised.
//
//   table (vocabulary, width) bf16 or quantised (weights.cuh), out (rows, width) f32
//   bytes: rows * width * (weight's + 4)     operations: 2 * rows * width
//   A block of 128 threads a row; a thread unpacks 16 bytes at a time. Reference: the dequantised table, exactly.
#include "weights.cuh"
#include "step.cuh"

template <class W>
DEVICE void embed(const int* step, const Word4* table, const unsigned short* scales, float* out, int width) {
    if (blockIdx.x >= static_cast<unsigned>(step[STEP_ROWS])) return;
    size_t token = step_ints(step, STEP_TOKENS)[blockIdx.x];
    int chunks = chunks_of<W>(width);
    float* row = out + static_cast<size_t>(blockIdx.x) * width;
    for (int i = threadIdx.x; i < chunks * 4; i += blockDim.x) {
        Word4 chunk = load_chunk(table, token, chunks, i / 4, i % 4);
        for (int b = 0; b < W::BLOCKS; b++) {
            int block = i / 4 * W::BLOCKS + b;
            if (block * BLOCK >= width) break;
            unsigned pairs[4];
            W::unpack(pairs, chunk, b);
            size_t at = token * chunks * W::BLOCKS + block;
            float scale = W::scale(scales, at), offset = W::offset(scales, at);
            for (int j = 0; j < 4; j++) {
                float* to = row + block * BLOCK + i % 4 * 8 + 2 * j;
                to[0] = fmaf(low_float(pairs[j]), scale, offset);
                to[1] = fmaf(high_float(pairs[j]), scale, offset);
            }
        }
    }
}

#define EMBED(NAME, KIND)                                                                               \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME(                                     \
        const int* step, const Word4* table, const unsigned short* scales, float* out, int width) {     \
        embed<KIND>(step, table, scales, out, width);                                                   \
    }

EMBED(bf16, Bf16)
EMBED(q8_0, Q8_0)
EMBED(q4_0, Q4_0)
EMBED(q4_1, Q4_1)
