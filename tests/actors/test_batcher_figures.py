"""What a batcher says of itself: the times are those of the requests, and each series is said once."""

import pytest

from actors import batcher_figures
from actors.batcher_figures import Figures
from actors.edge.metrics import _lines
from gpu.sequence import SequenceOutput, StepOutput, StepStats


@pytest.fixture
def clock(monkeypatch):
    """Set `clock.now`, the monotonic time that figures read."""

    class Clock:
        now = 100.0

        @classmethod
        def monotonic(cls):
            return cls.now

    monkeypatch.setattr(batcher_figures, "time", Clock)
    return Clock


def step(name="r", tokens=(7,), finish="", *, seconds=0.0, admitted=(), prefilled=0):
    output = SequenceOutput(name, 0, tokens, (), finish, "", 10, 0)
    outputs = (output,) if tokens or finish else ()
    return StepOutput(outputs, StepStats(forward_seconds=seconds, prefilled=prefilled), admitted)


def value(figures, sample):
    (line,) = [line for line in figures.lines("b", 0, 0) if line.startswith(f"antiphon_{sample}{{")]
    return float(line.split()[-1])


def has(figures, name):
    return any(line.startswith(f"antiphon_{name}") for line in figures.lines("b", 0, 0))


def test_queueing_ends_when_the_first_chunk_of_the_prompt_begins(clock):
    figures = Figures("m")
    figures.arrived("r", 4000)
    clock.now += 1.5  # one second in the queue, half a second of the first chunk
    figures.stepped(step(tokens=(), seconds=0.5, admitted=("r",)))
    for _ in range(3):
        clock.now += 0.5
        figures.stepped(step(tokens=(), seconds=0.5))
    clock.now += 0.5
    figures.stepped(step(seconds=0.5))
    assert value(figures, "request_queue_time_seconds_sum") == pytest.approx(1.0)
    assert value(figures, "time_to_first_token_seconds_sum") == pytest.approx(3.5)


def test_gaps_are_from_token_to_token(clock):
    figures = Figures("m")
    figures.arrived("r", 10)
    for _ in range(4):
        clock.now += 0.25
        figures.stepped(step())
    assert value(figures, "inter_token_latency_seconds_count") == 3
    assert value(figures, "inter_token_latency_seconds_sum") == pytest.approx(0.75)


@pytest.mark.parametrize("finish", ["cancelled", "error", "stop"])
def test_a_request_that_ends_without_a_token_had_no_first_one(clock, finish):
    figures = Figures("m")
    figures.arrived("r", 10)
    clock.now += 5
    figures.stepped(step(tokens=(), finish=finish))
    assert not has(figures, "time_to_first_token_seconds")
    assert not has(figures, "request_queue_time_seconds")
    assert value(figures, "e2e_request_latency_seconds_sum") == pytest.approx(5)
    assert value(figures, f"request_{finish}_total") == 1


def test_no_series_is_said_twice_by_two_batchers_of_one_model(clock):
    said = {}
    for name in ("batcher.0", "batcher.1"):
        figures = Figures("m")
        figures.arrived("r", 10)
        clock.now += 1
        figures.stepped(step(admitted=("r",), finish="stop"))
        said[name] = figures.lines(name, 1, 0)
    series = [line.rpartition(" ")[0] for line in _lines(said)]
    assert len(series) == len(set(series))
