"""A plan made into arrays: what the kernels read in a step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import define, field

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import Batch, SamplingBatch
from gpu.scheduler import Piece
from gpu.sequence import Sequence

_MAX_TOP_K = 2**31 - 1


@define(eq=False)
class _Row:
    """What is kept for a running sequence from step to step."""

    slot: int
    copied: int = 0
    """Leading blocks already in the table."""
    counts: Counter[int] | None = None
    """Tokens of the reply, counted, if a penalty asks for them."""
    counted: int = 0
    bias: dict[int, float] = field(factory=dict)


class BatchBuilder:
    """Keeps block tables and sampling parameters in arrays by slot: a step copies only what changed."""

    def __init__(self, max_batch: int, max_blocks: int, eos_ids: tuple[int, ...]) -> None:
        self._rows: dict[Sequence, _Row] = {}
        self._free = list(range(max_batch - 1, -1, -1))
        self._eos_ids = eos_ids
        self._tables = np.zeros((max_batch, max_blocks), np.int32)
        self._floats = np.zeros((max_batch, 6), np.float32)
        self._ints = np.zeros((max_batch, 2), np.int32)
        self._seeds = np.zeros(max_batch, np.uint64)

    def forget(self, sequence: Sequence) -> None:
        """The sequence left the running set: its slot is free."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._free.append(row.slot)

    def build(self, pieces: list[Piece]) -> Batch:
        """The arrays of a step, rows in the order of `pieces`."""
        tokens: list[int] = []
        spans, sampled, logit_rows, slots = [], [], [], []
        for piece in pieces:
            row = self._row(piece.sequence)
            first = len(tokens)
            tokens += piece.sequence.tokens[piece.start : piece.start + piece.count]
            spans.append((first, piece.count, piece.start))
            slots.append(row.slot)
            if piece.is_last:
                sampled.append((piece.sequence, row))
                logit_rows.append(len(tokens) - 1)
        sequences = np.array(spans, np.int32)
        counts = sequences[:, 1]
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(
            sequences[:, 2] - sequences[:, 0], counts
        )
        tables = self._tables[slots]
        owner = np.repeat(np.arange(len(pieces)), counts)
        block = tables[owner, positions // BLOCK_SIZE]
        return Batch(
            np.array(tokens, np.int32),
            positions,
            block * BLOCK_SIZE + positions % BLOCK_SIZE,
            sequences,
            tables,
            np.array(logit_rows, np.int32),
            self._sampling(sampled),
        )

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = self._enter(sequence)
        blocks = sequence.blocks
        if row.copied < len(blocks):
            self._tables[row.slot, row.copied : len(blocks)] = blocks[row.copied :]
            row.copied = len(blocks)
        return row

    def _enter(self, sequence: Sequence) -> _Row:
        p = sequence.request.params
        penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        row = _Row(self._free.pop(), counts=Counter() if penalised else None, bias=dict(p.logit_bias))
        self._floats[row.slot] = (
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        )  # fmt: skip
        self._ints[row.slot] = (min(p.top_k, _MAX_TOP_K), p.logprobs)
        self._seeds[row.slot] = p.seed % 2**64
        return row

    def _sampling(self, sampled: list[tuple[Sequence, _Row]]) -> SamplingBatch:
        slots = [row.slot for _, row in sampled]
        floats, ints = self._floats[slots], self._ints[slots]
        penalties = [self._penalties(sequence, row) for sequence, row in sampled]
        biases = [self._biases(sequence, row) for sequence, row in sampled]
        return SamplingBatch(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            seed=self._seeds[slots],
            position=np.array([sequence.position for sequence, _ in sampled], np.int32),
            logprobs=ints[:, 1],
            repetition=floats[:, 3],
            presence=floats[:, 4],
            frequency=floats[:, 5],
            penalty_starts=_starts(penalties),
            penalty_tokens=np.array([token for counts in penalties for token in counts], np.int32),
            penalty_counts=np.array([count for counts in penalties for count in counts.values()], np.int32),
            bias_starts=_starts(biases),
            bias_tokens=np.array([token for bias in biases for token in bias], np.int32),
            bias_values=np.array([value for bias in biases for value in bias.values()], np.float32),
        )

    @staticmethod
    def _penalties(sequence: Sequence, row: _Row) -> dict[int, int]:
        """Token → times in the reply.

        Tokens only in the prompt count 0: repetition looks at them, the others do not.
        """
        counts, tokens = row.counts, sequence.tokens
        if counts is None:
            return {}
        prompt = len(sequence.request.prompt)
        if not row.counted:
            if sequence.request.params.repetition_penalty != 1.0:
                counts.update(dict.fromkeys(tokens[:prompt], 0))
            row.counted = prompt
        counts.update(tokens[row.counted :])
        row.counted = len(tokens)
        return counts

    def _biases(self, sequence: Sequence, row: _Row) -> dict[int, float]:
        """The request's own, and what may not come yet, or never: `min_tokens`, `ignore_eos`."""
        params = sequence.request.params
        if sequence.position >= params.min_tokens:
            return row.bias
        ends = params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)
        return row.bias | dict.fromkeys(ends, -np.inf)


def _starts(
    rows: list[dict[int, int]] | list[dict[int, float]],
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)
