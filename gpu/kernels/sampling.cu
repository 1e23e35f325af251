// The next token of each wanted row: bias, penalties, temperature, top-k, min-p, top-p, a draw, and log-probabilities.
// Only token ids and the few log-probabilities that were asked for leave the card.
//
//   logits (samples, vocabulary) f32, changed in place; saved: f32, as many as the step has words
//   result (samples, 42) words: token (-1: no finite distribution), its log-probability f32, and the likeliest tokens,
//   20 ids and 20 f32; log-probabilities are the model's own, before anything was applied
//   bytes: samples * vocabulary * 4 a pass; 3 passes greedy, 8 with a temperature, 5 more each for top-k and top-p
//   A block of 512 threads a row. Reference: float64 on a sorted row, test_sampling.py
//
// Nothing is sorted. Probabilities become integers, of which 2^40 are the likeliest token's, so sums are exact and have
// no order; the item at which the running sum, from the likeliest on, reaches a target is found digit by digit over
// histograms. Top-k asks for the k-th item, top-p for the item that reaches p of the whole, the draw for a random place.
#include "common.cuh"
#include "philox.cuh"
#include "step.cuh"

constexpr int THREADS = 512, BINS = 256, TOP = 20, RESULT_WORDS = 2 + 2 * TOP;
constexpr float WHOLE = 1099511627776.0f;  // 2^40
constexpr float COLDEST = 1e-6f;

struct Shared {
    uint64 bins[BINS];
    uint64 scratch[WARP];
    int counts[THREADS];
    uint64 before;
    unsigned digit;
    int id;
    float raw;
};

struct Row {
    float* logits;
    int vocabulary;
    float top;  // the largest, after bias and penalties
    float temperature, min_p;
    unsigned last_key;  // items after this one, likeliest first, are out
    int last_id;
};

struct Item {
    unsigned key;
    int id;
    uint64 reached;  // the running sum up to it and with it
};

DEVICE uint64 block_reduce(uint64 value, uint64* scratch, bool sum) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int round = 0; round < 2; round++) {
        for (int step = WARP / 2; step > 0; step /= 2) {
            uint64 other = __shfl_xor_sync(ALL_LANES, value, step);
            value = sum ? value + other : other > value ? other : value;
        }
        if (round) return value;
        __syncthreads();
        if (lane == 0) scratch[warp] = value;
        __syncthreads();
        value = lane < warps ? scratch[lane] : 0;
    }
    return value;
}

// Larger logits first, then lower ids, as one number that is larger for what comes first.
DEVICE uint64 rank(float logit, int id) {
    unsigned bits = __float_as_uint(logit + 0.0f);  // -0 ranks as 0
    unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64>(ordered) << 32 | ~static_cast<unsigned>(id);
}
DEVICE int ranked_id(uint64 rank) { return static_cast<int>(~static_cast<unsigned>(rank)); }

// The first item that comes after `previous`; 0 where there is none.
DEVICE uint64 next_ranked(const Row& row, uint64 previous, Shared& shared) {
    uint64 best = 0;
    for (int i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
        uint64 here = rank(row.logits[i], i);
        if (here < previous && here > best) best = here;
    }
    return block_reduce(best, shared.scratch, false);
}

// How far below the top a logit lies, as a number whose digits can be compared; smaller comes first.
DEVICE unsigned key_of(const Row& row, float logit) { return __float_as_uint(row.top - logit); }

DEVICE bool kept(const Row& row, unsigned key, int id) {
    return key < row.last_key || (key == row.last_key && id <= row.last_id);
}

template <bool COUNT>
DEVICE uint64 weight_of(const Row& row, unsigned key) {
    if (COUNT) return 1;
    float p = expf(-__uint_as_float(key) / row.temperature);
    return p < row.min_p ? 0 : static_cast<uint64>(p * WHOLE);
}

// Add up the weights of the kept items that begin with `prefix`, by their next eight bits.
template <bool COUNT>
DEVICE void fill_bins(const Row& row, unsigned prefix, int shift, Shared& shared) {
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) shared.bins[i] = 0;
    __syncthreads();
    unsigned bin = 0;
    uint64 sum = 0;  // neighbours often share a bin: one addition for all of them
    for (int i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
        unsigned key = key_of(row, row.logits[i]);
        if ((shift < 24 && key >> (shift + 8) != prefix) || !kept(row, key, i)) continue;
        unsigned here = key >> shift & (BINS - 1);
        if (here != bin && sum) atomicAdd(&shared.bins[bin], sum), sum = 0;
        bin = here;
        sum += weight_of<COUNT>(row, key);
    }
    if (sum) atomicAdd(&shared.bins[bin], sum);
    __syncthreads();
}

// The id of the `n`th item with this key, counted from 1.
DEVICE int nth_with_key(const Row& row, unsigned key, uint64 n, Shared& shared) {
    int share = (row.vocabulary + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * share;
    int end = min(begin + share, row.vocabulary), count = 0;
    for (int i = begin; i < end; i++) count += key_of(row, row.logits[i]) == key;
    shared.counts[threadIdx.x] = count;
    __syncthreads();
    uint64 before = 0;
    for (unsigned t = 0; t < threadIdx.x; t++) before += shared.counts[t];
    if (before < n && n <= before + count) {
        for (int i = begin; i < end; i++)
            if (key_of(row, row.logits[i]) == key && ++before == n) shared.id = i;
    }
    __syncthreads();
    return shared.id;
}

// The item at which the running sum of weights, first item first, reaches `target`; 1 <= target <= their sum.
template <bool COUNT>
DEVICE Item select(const Row& row, uint64 target, Shared& shared) {
    unsigned prefix = 0;
    uint64 before = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        fill_bins<COUNT>(row, prefix, shift, shared);
        if (threadIdx.x == 0) {
            unsigned bin = 0;
            while (bin < BINS - 1 && before + shared.bins[bin] < target) before += shared.bins[bin++];
            shared.before = before, shared.digit = bin;
        }
        __syncthreads();
        before = shared.before, prefix = prefix << 8 | shared.digit;
    }
    // All that are left have this key, so all weigh the same, and more than nothing: the last of them is in.
    uint64 each = weight_of<COUNT>(row, prefix), n = (target - before + each - 1) / each;
    return Item{prefix, nth_with_key(row, prefix, n, shared), before + n * each};
}

DEVICE void keep_up_to(Row& row, const Item& item) { row.last_key = item.key, row.last_id = item.id; }

DEVICE uint64 kept_mass(const Row& row, Shared& shared) {
    uint64 mass = 0;
    for (int i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
        unsigned key = key_of(row, row.logits[i]);
        if (kept(row, key, i)) mass += weight_of<false>(row, key);
    }
    return block_reduce(mass, shared.scratch, true);
}

// Cut to top-k and top-p, then draw.
DEVICE int draw(Row& row, int top_k, float top_p, unsigned bits, Shared& shared) {
    if (top_k > 0 && top_k < row.vocabulary) keep_up_to(row, select<true>(row, top_k, shared));
    uint64 mass = kept_mass(row, shared);
    if (top_p < 1.0f) {
        uint64 target = static_cast<uint64>(ceil(static_cast<double>(top_p) * static_cast<double>(mass)));
        Item last = select<false>(row, target < 1 ? 1 : target > mass ? mass : target, shared);
        keep_up_to(row, last);
        mass = last.reached;
    }
    // floor(bits / 2^24 * mass) + 1, without losing the upper bits
    uint64 target = (mass >> 24) * bits + ((mass & 0xffffff) * bits >> 24) + 1;
    return select<false>(row, target, shared).id;
}

// A list's part of one sample: (token, value) pairs; each token comes once in a list.
struct List {
    int begin, end;
    const int* tokens;
    float* saved;  // what the token's logit was before
};

DEVICE List list_of(const int* step, StepWord starts, StepWord tokens, int sample, float* saved) {
    const int* start = step_ints(step, starts) + sample;
    return List{start[0], start[1], step_ints(step, tokens), saved + step[tokens]};
}

DEVICE void apply_bias(const Row& row, const List& list, const float* values) {
    for (int j = list.begin + threadIdx.x; j < list.end; j += blockDim.x) {
        float* logit = row.logits + list.tokens[j];
        list.saved[j] = *logit;
        *logit += values[j];
    }
    __syncthreads();
}

DEVICE void apply_penalties(const Row& row, const List& list, const int* counts, float repetition, float presence,
                            float frequency) {
    for (int j = list.begin + threadIdx.x; j < list.end; j += blockDim.x) {
        float* logit = row.logits + list.tokens[j];
        list.saved[j] = *logit;
        float value = *logit > 0.0f ? *logit / repetition : *logit * repetition;
        *logit = value - (counts[j] * frequency + (counts[j] > 0 ? presence : 0.0f));
    }
    __syncthreads();
}

// The token's logit as the model gave it: what was saved first, or what is there.
DEVICE float raw_logit(const Row& row, int token, const List& bias, const List& penalties, Shared& shared) {
    if (threadIdx.x == 0) shared.raw = row.logits[token];
    __syncthreads();
    for (int j = penalties.begin + threadIdx.x; j < penalties.end; j += blockDim.x)
        if (penalties.tokens[j] == token) shared.raw = penalties.saved[j];
    __syncthreads();
    for (int j = bias.begin + threadIdx.x; j < bias.end; j += blockDim.x)
        if (bias.tokens[j] == token) shared.raw = bias.saved[j];
    __syncthreads();
    return shared.raw;
}

// log(sum of exp(logit)), or NaN if any logit is not finite.
DEVICE float log_total(const Row& row, float top, Shared& shared) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
        float logit = row.logits[i];
        sum += fabsf(logit) < infinity() ? expf(logit - top) : infinity() - infinity();
    }
    return top + logf(block_sum(sum, reinterpret_cast<float*>(shared.scratch)));
}

// The likeliest tokens and their log-probabilities, best first. Returns with result's first two words unwritten.
DEVICE void list_likeliest(const Row& row, uint64 best, int wanted, float total, int* result, Shared& shared) {
    for (int i = 0; i < TOP; i++) {
        bool there = i < wanted && best;
        if (threadIdx.x == 0) {
            result[2 + i] = there ? ranked_id(best) : 0;
            result[2 + TOP + i] = there ? __float_as_uint(row.logits[ranked_id(best)] - total) : 0;
        }
        if (there && i + 1 < wanted) best = next_ranked(row, best, shared);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(const int* step, float* logits, int vocabulary, float* saved,
                                                             int* result) {
    int at = blockIdx.x;
    if (at >= step[STEP_SAMPLES]) return;
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    Row row{logits + static_cast<size_t>(at) * vocabulary, vocabulary};
    row.last_key = 0xffffffffu, row.last_id = vocabulary;
    result += at * RESULT_WORDS;
    uint64 best = next_ranked(row, ~0ull, shared);
    float total = log_total(row, row.logits[ranked_id(best)], shared);
    bool broken = !(fabsf(total) < infinity());
    list_likeliest(row, best, broken ? 0 : step_ints(step, STEP_LOGPROBS)[at], total, result, shared);
    List bias = list_of(step, STEP_BIAS_STARTS, STEP_BIAS_TOKENS, at, saved);
    List penalties = list_of(step, STEP_PENALTY_STARTS, STEP_PENALTY_TOKENS, at, saved);
    apply_bias(row, bias, step_floats(step, STEP_BIAS_VALUES));
    apply_penalties(row, penalties, step_ints(step, STEP_PENALTY_COUNTS), step_floats(step, STEP_REPETITION)[at],
                    step_floats(step, STEP_PRESENCE)[at], step_floats(step, STEP_FREQUENCY)[at]);
    if (bias.end > bias.begin || penalties.end > penalties.begin) best = next_ranked(row, ~0ull, shared);
    int token = ranked_id(best);
    row.top = row.logits[token];
    broken = broken || !(fabsf(row.top) < infinity());
    row.temperature = step_floats(step, STEP_TEMPERATURE)[at], row.min_p = step_floats(step, STEP_MIN_P)[at];
    if (!broken && row.temperature > 0.0f) {
        row.temperature = fmaxf(row.temperature, COLDEST);
        const unsigned* seed = reinterpret_cast<const unsigned*>(step_ints(step, STEP_SEED)) + 2 * at;
        unsigned bits = draw_bits(seed[0], seed[1], step_ints(step, STEP_POSITION)[at]);
        token = draw(row, step_ints(step, STEP_TOP_K)[at], step_floats(step, STEP_TOP_P)[at], bits, shared);
    }
    float raw = broken ? 0.0f : raw_logit(row, token, bias, penalties, shared);
    if (threadIdx.x == 0) {
        result[0] = broken ? -1 : token;
        result[1] = broken ? 0 : __float_as_uint(raw - total);
    }
}
