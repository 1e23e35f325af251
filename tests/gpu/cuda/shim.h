// A CUDA device in plain C++, for tests: the same .cu text, compiled by g++, runs block by block on a CPU.
//
// Each thread of a block is a fiber with a stack of its own; __syncthreads and the warp-wide instructions hand over to
// the next one. Fibers run in an order drawn from a seed, and warps at speeds of their own, so a missing barrier shows
// as a result that moves. Shared memory begins as NaN and has a guard behind it. An asynchronous copy lands at once or
// when its thread waits for it, as the seed will have it.
// Warp-wide instructions follow the register layouts of the PTX manual, written out. Not covered: races between
// blocks, and memory order.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cmath>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define DEVICE static inline

struct Extent { unsigned x, y, z; };

namespace shim {

constexpr int WARP_LANES = 32, STACK = 128 << 10, MOST_THREADS = 1024, PATIENCE = 100, NAP = 40, GUARD = 256, SLOT = 64;
constexpr unsigned char POISON = 0xff, CANARY = 0xa5;

struct Copy { void* to; const void* from; bool valid; int group; };

struct Fiber {
    jmp_buf resume;
    ucontext_t start;
    std::vector<char> stack;
    bool started = false, done = false;
    int index = 0, committed = 0;
    std::vector<Copy> copies;
};

struct Meeting {  // of all the threads of a warp or a block
    int arrived = 0;
    long generation = 0;
};

struct Warp {
    Meeting meeting;
    unsigned char slots[2][WARP_LANES][SLOT];
};

static Extent thread_index, block_index, block_extent, grid_extent;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<unsigned char> shared;
static Meeting block;
static Fiber* current;
static jmp_buf scheduler;
static long progress;
static uint32_t random_state;
static void (*body)(void*);
static void* body_argument;

static inline uint32_t draw(uint32_t below) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % below;
}

static inline void yield() {
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

static inline void meet(Meeting& meeting, int members) {
    long mine = meeting.generation;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        meeting.generation++;
        progress++;
        return;
    }
    while (meeting.generation == mine) yield();
}

// A fiber lives on from block to block: making one costs a system call.
static void enter() {
    for (;;) {
        body(body_argument);
        current->done = true;
        progress++;
        yield();
    }
}

static void prepare(int threads) {
    if (fibers.empty()) fibers.resize(MOST_THREADS);  // never moved: they hold their own contexts
    warps.assign(threads / WARP_LANES, Warp());
    block = Meeting();
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.done) fiber.started = false;  // new, or stuck in a deadlock
        fiber.done = false;
        fiber.index = i, fiber.committed = 0;
        fiber.copies.clear();
        if (fiber.started) continue;
        fiber.stack.resize(STACK);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
    }
}

static void resume(Fiber& fiber) {
    current = &fiber;
    unsigned i = fiber.index;
    thread_index = {i % block_extent.x, i / block_extent.x % block_extent.y, i / (block_extent.x * block_extent.y)};
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// Runs one block. False: every thread that is left waits for one that will not come.
static bool run_block(int threads) {
    prepare(threads);
    std::vector<int> order(threads);
    for (int i = 0; i < threads; i++) order[i] = i;
    for (int i = threads - 1; i > 0; i--) std::swap(order[i], order[draw(i + 1)]);
    int idle = 0;
    uint32_t awake = ~0u;  // one bit a warp; the others sleep, for some rounds or until nothing moves
    for (int left = threads; left > 0 && idle < PATIENCE;) {
        long before = progress;
        if (threads > WARP_LANES && (idle || !draw(NAP))) awake = draw(1 << 24) << 8 | draw(1 << 8);
        left = 0;
        for (int i : order) {
            if (!fibers[i].done && awake >> (i / WARP_LANES) & 1) resume(fibers[i]);
            left += !fibers[i].done;
        }
        idle = progress == before ? idle + 1 : 0;
    }
    return idle < PATIENCE;
}

// Every lane gives `bytes`; `read` then sees what all 32 gave.
template <class Read>
static inline void exchange(const void* value, int bytes, Read read) {
    static_assert(SLOT >= 32, "a lane's share of mma");
    Fiber* self = current;
    Warp& warp = warps[self->index / WARP_LANES];
    int side = warp.meeting.generation & 1, lane = self->index % WARP_LANES;
    std::memcpy(warp.slots[side][lane], value, bytes);
    meet(warp.meeting, WARP_LANES);
    read(warp.slots[side], lane);
}

template <class T>
static inline T take(unsigned char (*slots)[SLOT], int lane, int at = 0) {
    T value;
    std::memcpy(&value, slots[lane] + at * sizeof(T), sizeof(T));
    return value;
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
}

template <class T>
static constexpr char code_of() {
    return std::is_pointer<T>::value ? 'p' : std::is_floating_point<T>::value ? 'f' : std::is_signed<T>::value ? 'i' : 'u';
}

// One letter a parameter: p(ointer), f(loat), i(nt), u(nsigned).
template <class... P>
static const char* signature(void (*)(P...)) {
    static const char codes[] = {code_of<P>()..., 0};
    return codes;
}

enum Outcome { DONE, DEADLOCK, SHARED_OVERRUN, BAD_BLOCK };

template <class... P>
static int launch(void (*kernel)(P...), void** arguments, const unsigned* grid, const unsigned* block_shape,
                  unsigned shared_bytes, unsigned seed) {
    grid_extent = {grid[0], grid[1], grid[2]};
    block_extent = {block_shape[0], block_shape[1], block_shape[2]};
    int threads = block_extent.x * block_extent.y * block_extent.z;
    if (threads % WARP_LANES || threads > MOST_THREADS) return BAD_BLOCK;
    struct Call { void (*kernel)(P...); void** arguments; } this_call = {kernel, arguments};
    body_argument = &this_call;
    body = [](void* argument) {
        Call* c = static_cast<Call*>(argument);
        call(c->kernel, c->arguments, std::index_sequence_for<P...>());
    };
    random_state = seed;
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                shared.assign(shared_bytes + GUARD + 16, POISON);
                size_t skew = 16 - reinterpret_cast<uintptr_t>(shared.data()) % 16;
                std::memset(shared.data() + skew % 16 + shared_bytes, CANARY, GUARD);
                if (!run_block(threads)) return DEADLOCK;
                for (int i = 0; i < GUARD; i++)
                    if (shared[skew % 16 + shared_bytes + i] != CANARY) return SHARED_OVERRUN;
            }
    return DONE;
}

}  // namespace shim

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_extent
#define gridDim shim::grid_extent

static inline void __syncthreads() {
    shim::meet(shim::block, blockDim.x * blockDim.y * blockDim.z);
}

static inline void __syncwarp() {
    shim::exchange("", 1, [](auto, int) {});
}

template <class T>
static inline T __shfl_sync(unsigned, T value, int from) {
    shim::exchange(&value, sizeof(T), [&](auto slots, int) { value = shim::take<T>(slots, from % 32); });
    return value;
}

template <class T>
static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    shim::exchange(&value, sizeof(T), [&](auto slots, int lane) { value = shim::take<T>(slots, lane ^ mask); });
    return value;
}

static inline int __any_sync(unsigned, int predicate) {
    int any = 0;
    shim::exchange(&predicate, sizeof(int), [&](auto slots, int) {
        for (int i = 0; i < 32; i++) any |= shim::take<int>(slots, i) != 0;
    });
    return any;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }

template <class T>
static inline T atomicAdd(T* to, T value) {
    T before = *to;
    *to += value;
    return before;
}

// From here on: the twins of gpu/kernels/machine.cuh.
typedef unsigned short bf16;
typedef unsigned long long uint64;
struct __align__(16) Word4 { unsigned x, y, z, w; };
struct __align__(8) Word2 { unsigned x, y; };

DEVICE unsigned char* shared_memory() {
    size_t skew = (16 - reinterpret_cast<uintptr_t>(shim::shared.data()) % 16) % 16;
    return shim::shared.data() + skew;
}

DEVICE float half_to_float(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}

DEVICE unsigned round_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

DEVICE unsigned pack_bf16(float low, float high) { return round_bf16(high) << 16 | round_bf16(low); }

DEVICE float bf16_at(unsigned pair, int half) {
    return __uint_as_float(half ? pair & 0xffff0000u : pair << 16);
}

DEVICE unsigned add_bf16x2(unsigned a, unsigned b) {
    return pack_bf16(bf16_at(a, 0) + bf16_at(b, 0), bf16_at(a, 1) + bf16_at(b, 1));
}

DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    shim::exchange(mine, sizeof(mine), [&](auto slots, int lane) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            int row = g + (i / 2) * 8, column = 2 * t + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 16; k++) {
                int owner = k % 8 / 2, high = k / 8;
                unsigned left = shim::take<unsigned>(slots, row % 8 * 4 + owner, row / 8 + 2 * high);
                unsigned right = shim::take<unsigned>(slots, column * 4 + owner, 4 + high);
                sum += bf16_at(left, k % 2) * bf16_at(right, k % 2);
            }
            c[i] += sum;
        }
    });
}

DEVICE void load_transposed(unsigned (&out)[4], const void* row) {
    shim::exchange(&row, sizeof(row), [&](auto slots, int lane) {
        int g = lane / 4, t = lane % 4;
        for (int tile = 0; tile < 4; tile++) {
            auto at = [&](int r) {
                return static_cast<unsigned>(shim::take<const unsigned short*>(slots, tile * 8 + r)[g]);
            };
            out[tile] = at(2 * t + 1) << 16 | at(2 * t);
        }
    });
    // The tile may be overwritten as soon as the slowest lane has read it, not before.
    __syncwarp();
}

DEVICE void land(const shim::Copy& copy) {
    if (copy.valid) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}

DEVICE void copy_later(void* to, const void* from, bool valid) {
    shim::Copy copy = {to, from, valid, shim::current->committed};
    if (shim::draw(2)) land(copy);
    else shim::current->copies.push_back(copy);
}

DEVICE void commit_copies() { shim::current->committed++; }

template <int PENDING>
DEVICE void wait_copies() {
    std::vector<shim::Copy> later;
    for (const shim::Copy& copy : shim::current->copies) {
        if (copy.group >= shim::current->committed - PENDING) later.push_back(copy);
        else land(copy);
    }
    shim::current->copies.swap(later);
}

#define KERNEL(NAME)                                                                                             \
    extern "C" int run_##NAME(void** arguments, const unsigned* grid, const unsigned* block, unsigned shared,    \
                              unsigned seed) {                                                                   \
        return shim::launch(NAME, arguments, grid, block, shared, seed);                                         \
    }                                                                                                            \
    extern "C" const char* signature_##NAME() { return shim::signature(NAME); }
