"""Which values a setting may have: what nothing can run with is refused before anything starts."""

import argparse
import os

import pytest

from gpu.engine_on_gpu import TOKEN_BUDGET
from scripts.config import MOST_PROCESSES, MOST_SEQUENCES, Config, load, seconds
from scripts.failure import UsageFault

DURATIONS = ("disconnect_grace", "drain", "keepalive")


def from_environment(tmp_path, **settings):
    return load({}, directory=tmp_path, environ={f"ANTIPHON_{k.upper()}": v for k, v in settings.items()})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1"])
@pytest.mark.parametrize("name", [*DURATIONS, "fast_answer_pace"])
def test_a_duration_is_a_finite_number(tmp_path, name, value):
    with pytest.raises(UsageFault, match=rf"{name} is {float(value)}: it must be a finite number"):
        from_environment(tmp_path, **{name: value})


def test_as_many_threads_as_cores_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert from_environment(tmp_path, threads="3").threads == 3
    with pytest.raises(UsageFault, match=r"threads is 4: .* to 3, the cores"):
        from_environment(tmp_path, threads="4")


def test_no_engine_takes_more_sequences_than_a_step_has_tokens_beside_prefill(tmp_path):
    assert MOST_SEQUENCES < TOKEN_BUDGET == MOST_SEQUENCES + 1
    assert from_environment(tmp_path, max_batch=str(MOST_SEQUENCES)).max_batch == MOST_SEQUENCES
    with pytest.raises(UsageFault, match="max_batch is 2048"):
        from_environment(tmp_path, max_batch=str(MOST_SEQUENCES + 1))


@pytest.mark.parametrize("name", ["edges", "sessions", "safety_replicas", "fast_answer_replicas"])
def test_processes_of_a_kind_are_bounded(tmp_path, name):
    assert getattr(from_environment(tmp_path, **{name: str(MOST_PROCESSES)}), name) == MOST_PROCESSES
    for wrong in (-1, MOST_PROCESSES + 1):
        with pytest.raises(UsageFault, match=f"{name} is {wrong}"):
            from_environment(tmp_path, **{name: str(wrong)})


def test_there_may_be_no_fast_answers_but_never_no_edge():
    assert Config(fast_answer_replicas=0).fast_answer_replicas == 0
    with pytest.raises(UsageFault, match="edges is 0"):
        Config(edges=0)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
def test_a_flag_in_seconds_is_a_finite_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"0 or more, not '{text}'"):
        seconds(text)
    assert seconds("2.5") == 2.5
