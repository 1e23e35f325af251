// What the kernels ask of the hardware beyond plain C++: warp-wide matrix products, transposed tile loads and copies
// that do not wait. Each is one instruction in PTX; the tests put a plain C++ twin in place of this file.
#pragma once

#define DEVICE static __device__ __forceinline__

typedef unsigned short bf16;         // the upper half of an IEEE single
typedef unsigned long long uint64;

struct __align__(16) Word4 { unsigned x, y, z, w; };
struct __align__(8) Word2 { unsigned x, y; };

// The block's shared memory, as large as the launch says.
DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
}

DEVICE float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Two floats rounded to nearest even; `low` becomes the lower half of the word.
DEVICE unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// a - b in both halves; exact for the small integers it is used on. `b` comes negated, for sm_80 has only fma.
DEVICE unsigned add_bf16x2(unsigned a, unsigned negated) {
    unsigned word;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(0x3F803F80u), "r"(negated));
    return word;
}

// c += a * b, a: 16x16 (row), b: 16x8 (col), in bf16 with fp32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0] = A[g][2t..], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]
//   b0 = B[2t..][g], b1 = B[2t+8..][g]      c = C[g][2t], C[g][2t+1], C[g+8][2t], C[g+8][2t+1]
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 tiles of 16-bit elements, transposed. Lane l names row l % 8 of tile l / 8, in shared memory; it receives
// from tile i the elements [2t][g] and [2t+1][g] in out[i].
DEVICE void load_transposed(unsigned (&out)[4], const void* row) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Start copying 16 bytes to shared memory; zeros where `valid` is false, and then `from` is not read.
DEVICE void copy_later(void* to, const void* from, bool valid) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of the groups this thread committed are under way.
template <int PENDING>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
