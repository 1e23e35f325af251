// One step's input, as one run of 32-bit words that is copied to the card at once: a header, then the arrays of
// gpu.kernels.Batch one after the other. The header says where each begins, so a captured graph needs no new
// arguments. gpu/kernels/cuda_step.py writes it; the order of the names is the same there.
#pragma once
#include "machine.cuh"

enum StepWord {
    STEP_ROWS,
    STEP_SEQUENCES,
    STEP_SAMPLES,
    STEP_COLUMNS,  // of the block tables
    STEP_TOKENS,   // from here on: where the array begins, in words from the header's start
    STEP_POSITIONS,
    STEP_SLOTS,
    STEP_SPANS,  // (sequences, 3): first row, number of rows, position of the first row
    STEP_PIECES,  // (sequences,): where attention_decode keeps its parts; -1: the sequence is attention_prefill's
    STEP_TABLES,
    STEP_LOGIT_ROWS,
    STEP_TEMPERATURE,
    STEP_TOP_P,
    STEP_MIN_P,
    STEP_TOP_K,
    STEP_SEED,  // two words each, the lower one first
    STEP_POSITION,
    STEP_LOGPROBS,
    STEP_REPETITION,
    STEP_PRESENCE,
    STEP_FREQUENCY,
    STEP_PENALTY_STARTS,
    STEP_PENALTY_TOKENS,
    STEP_PENALTY_COUNTS,
    STEP_BIAS_STARTS,
    STEP_BIAS_TOKENS,
    STEP_BIAS_VALUES,
    STEP_HEADER,  // words in the header
};

DEVICE const int* step_ints(const int* step, StepWord what) { return step + step[what]; }
DEVICE const float* step_floats(const int* step, StepWord what) {
    return reinterpret_cast<const float*>(step + step[what]);
}
