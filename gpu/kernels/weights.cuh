// A linear layer's weights as they lie on the card, and how a warp reads them as operands of `mma`.
//
// A row is cut in blocks of 32. Within a block lane t = 0..3 of a row owns the eight weights 8t..8t+7, as four words
// of two bf16 each; activations are read in the same order, so which weight sits in which slot of the product does not
// matter. The lane's share of one or more blocks fills 16 bytes, a `Chunk`: one load. A row is padded to whole chunks.
//   bf16  chunk = 1 block:  8 weights
//   q8_0  chunk = 2 blocks: 8 bytes each                         scales: f16 a block
//   q4_0  chunk = 4 blocks: 8 nibbles each, weight 2j in nibble j and 2j+1 in nibble j+4; scales: f16 a block
//   q4_1  the same;                                              scales: two f16 a block, scale and offset
// Quantised weights enter the product as exact integers; the block's scale is applied to its fp32 sum.
// gpu/kernels/cuda_weights.py writes this layout from GGUF's. Reference: dequantised float64.
#pragma once
#include "common.cuh"

constexpr int BLOCK = 32;

struct Bf16 {
    static constexpr int BLOCKS = 1;
    static constexpr bool SCALED = false, OFFSET = false;
    DEVICE void unpack(unsigned (&out)[4], const Word4& chunk, int) {
        out[0] = chunk.x, out[1] = chunk.y, out[2] = chunk.z, out[3] = chunk.w;
    }
    DEVICE float scale(const unsigned short*, size_t) { return 1.0f; }
    DEVICE float offset(const unsigned short*, size_t) { return 0.0f; }
};

DEVICE unsigned chunk_word(const Word4& chunk, int i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

struct Q8_0 {
    static constexpr int BLOCKS = 2;
    static constexpr bool SCALED = true, OFFSET = false;
    // 2^23 + n as a float has n in its lowest byte: cheaper than eight conversions.
    DEVICE float as_float(unsigned word, int byte) {
        return __uint_as_float(0x4b000000u | ((word >> (8 * byte)) & 0xffu)) - 8388736.0f;
    }
    DEVICE void unpack(unsigned (&out)[4], const Word4& chunk, int block) {
        for (int half = 0; half < 2; half++) {
            unsigned word = chunk_word(chunk, 2 * block + half) ^ 0x80808080u;
            out[2 * half] = pack_bf16(as_float(word, 0), as_float(word, 1));
            out[2 * half + 1] = pack_bf16(as_float(word, 2), as_float(word, 3));
        }
    }
    DEVICE float scale(const unsigned short* scales, size_t block) { return half_to_float(scales[block]); }
    DEVICE float offset(const unsigned short*, size_t) { return 0.0f; }
};

// 0x4300 is 128 in bf16, and its four lowest bits count units: 128 + n, then minus 128 + ZERO.
template <unsigned MINUS>
DEVICE void unpack_nibbles(unsigned (&out)[4], const Word4& chunk, int block) {
    unsigned word = chunk_word(chunk, block);
    for (int j = 0; j < 4; j++) out[j] = add_bf16x2(((word >> (4 * j)) & 0x000f000fu) | 0x43004300u, MINUS);
}

struct Q4_0 {
    static constexpr int BLOCKS = 4;
    static constexpr bool SCALED = true, OFFSET = false;
    DEVICE void unpack(unsigned (&out)[4], const Word4& chunk, int block) {
        unpack_nibbles<0xc308c308u>(out, chunk, block);  // -(128 + 8)
    }
    DEVICE float scale(const unsigned short* scales, size_t block) { return half_to_float(scales[block]); }
    DEVICE float offset(const unsigned short*, size_t) { return 0.0f; }
};

struct Q4_1 {
    static constexpr int BLOCKS = 4;
    static constexpr bool SCALED = true, OFFSET = true;
    DEVICE void unpack(unsigned (&out)[4], const Word4& chunk, int block) {
        unpack_nibbles<0xc300c300u>(out, chunk, block);  // -128
    }
    DEVICE float scale(const unsigned short* scales, size_t block) { return half_to_float(scales[2 * block]); }
    DEVICE float offset(const unsigned short* scales, size_t block) { return half_to_float(scales[2 * block + 1]); }
};

template <class W>
DEVICE int chunks_of(int columns) {
    return (columns / BLOCK + W::BLOCKS - 1) / W::BLOCKS;
}

DEVICE Word4 load_chunk(const Word4* data, size_t row, int chunks, int chunk, int lane) {
    return data[(row * chunks + chunk) * 4 + lane];
}
