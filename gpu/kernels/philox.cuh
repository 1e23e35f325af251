// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator of
// gpu/philox.py: a token's draw depends on the seed and its position, and on nothing that happened before.
#pragma once
#include "machine.cuh"

// 24 random bits for (seed, position).
DEVICE unsigned draw_bits(unsigned seed_low, unsigned seed_high, unsigned position) {
    unsigned c0 = position, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        unsigned left = __umulhi(0xD2511F53u, c0), right = __umulhi(0xCD9E8D57u, c2);
        unsigned low = 0xD2511F53u * c0, right_low = 0xCD9E8D57u * c2;
        c0 = right ^ c1 ^ seed_low, c1 = right_low;
        c2 = left ^ c3 ^ seed_high, c3 = low;
        seed_low += 0x9E3779B9u, seed_high += 0xBB67AE85u;
    }
    return c0 >> 8;
}
