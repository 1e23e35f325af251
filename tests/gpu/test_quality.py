"""What quantised arithmetic costs: the engine's own numbers against fp32, over a long text."""

from pathlib import Path

import numpy as np
import pytest
from reference import reference_scores

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import Batch, SamplingBatch
from gpu.kernels.host import HostKernels
from gpu.llama import Llama
from gpu.tokenizer import load_tokenizer
from gpu.weights import open_weights

TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS, CHUNK = 2000, 125


def _forced(targets):
    """Sampling that must choose `targets`: their log-probabilities are still the model's own."""
    n = len(targets)
    zeros, none = np.zeros(n, np.float32), np.zeros(n, np.int32)
    return SamplingBatch(
        temperature=zeros, top_p=zeros + 1, min_p=zeros, top_k=none, seed=np.zeros(n, np.uint64), position=none,
        logprobs=none, repetition=zeros + 1, presence=zeros, frequency=zeros,
        penalty_starts=np.zeros(n + 1, np.int32), penalty_tokens=none, penalty_counts=none,
        bias_starts=np.arange(n + 1, dtype=np.int32), bias_tokens=np.array(targets, np.int32), bias_values=zeros + 1e9,
    )  # fmt: skip


def _engine_scores(path, source, tokens):
    kernels = HostKernels(source, path, max_rows=CHUNK, max_samples=CHUNK, context=len(tokens))
    blocks = -(-len(tokens) // BLOCK_SIZE)
    kernels.allocate_cache(blocks)
    model, out = Llama(source, kernels), []
    for start in range(0, len(tokens) - 1, CHUNK):
        here, targets = tokens[start : start + CHUNK], tokens[start + 1 : start + 1 + CHUNK]
        rows = np.arange(len(here), dtype=np.int32)
        batch = Batch(
            np.array(here, np.int32), rows + start, rows + start, np.array([[0, len(here), start]], np.int32),
            np.arange(blocks, dtype=np.int32)[None], rows[: len(targets)], _forced(targets),
        )  # fmt: skip
        result = model.step(batch)
        assert result.tokens.tolist() == targets
        out += result.logprobs.tolist()
    kernels.close()
    return np.array(out)


@pytest.mark.slow
@pytest.mark.model
def test_two_thousand_tokens_are_as_likely_as_the_fp32_reference_says(default_model):
    tokens = load_tokenizer(default_model).encode(TEXT.read_text())[:TOKENS]
    assert len(tokens) == TOKENS
    _, source = open_weights(default_model)
    ours, exact = _engine_scores(default_model, source, tokens), reference_scores(source, tokens)
    assert abs(ours.mean() - exact.mean()) < 0.01
    assert np.abs(ours - exact).max() < 0.25
