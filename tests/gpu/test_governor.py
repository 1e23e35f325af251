"""Chunks of prompts beside decoding: as large as the gap that those who decode may have."""

import pytest

from gpu.governor import STRETCH, UNSEEN, ChunkGovernor

TOKEN = 0.001
"""Seconds that a prompt's token adds on this made-up machine."""


def alone(decoded):
    return 0.003 + 0.001 * decoded


def governed(*decoded, budget=256, steps=60):
    """The governor after steps that each decode for so many, with and without a piece of a prompt beside them."""
    governor = ChunkGovernor(budget)
    for count in decoded:
        for _ in range(steps):
            governor.note(count, 0, alone(count))
            governor.note(count, governor.chunk, alone(count) + TOKEN * governor.chunk)
    return governor


def step(governor, decoded):
    return alone(decoded) + TOKEN * governor.chunk


@pytest.mark.parametrize("decoded", [1, 2, 4, 8])
def test_beside_few_a_step_takes_what_nobody_sees(decoded):
    assert step(governed(decoded), decoded) == pytest.approx(UNSEEN, abs=2 * TOKEN)


@pytest.mark.parametrize("decoded", [20, 32])
def test_beside_many_it_takes_a_multiple_of_a_step_without(decoded):
    assert step(governed(decoded), decoded) == pytest.approx(STRETCH * alone(decoded), abs=2 * TOKEN)


def test_what_many_took_is_not_held_against_few():
    governor = governed(32, 1)
    assert step(governor, 1) == pytest.approx(UNSEEN, abs=2 * TOKEN)
    governor.note(32, governor.chunk, alone(32) + TOKEN * governor.chunk)
    assert step(governor, 32) == pytest.approx(STRETCH * alone(32), abs=4 * TOKEN)


def test_a_prompt_without_company_teaches_what_its_tokens_cost():
    governor = ChunkGovernor(256)
    governor.note(0, 256, 256 * TOKEN)
    governor.note(1, 0, alone(1))
    assert step(governor, 1) == pytest.approx(UNSEEN, abs=2 * TOKEN)


@pytest.mark.parametrize(("seconds", "chunk"), [(1e-9, 64), (1.0, 4)])
def test_a_chunk_is_never_out_of_bounds(seconds, chunk):
    governor = ChunkGovernor(64)
    governor.note(1, 0, 0.004)
    for _ in range(50):
        governor.note(1, 1, 0.004 + seconds)
    assert governor.chunk == chunk
