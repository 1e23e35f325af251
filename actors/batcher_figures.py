"""A batcher's figures: histograms and counters in Prometheus's text form, named in parallel to vLLM's."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from attrs import define, field

from gpu.sequence import SequenceOutput, StepOutput, StepStats

LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Upper bounds in seconds."""
_LENGTHS = ((256, "0-256"), (1024, "257-1024"), (4096, "1025-4096"))


def length_bucket(prompt_tokens: int) -> str:
    """Return the label for a prompt's length."""
    return next((label for bound, label in _LENGTHS if prompt_tokens <= bound), "4097+")


@define
class Histogram:
    """Cumulative buckets over `LATENCY`, a sum and a count."""

    buckets: list[int] = field(factory=lambda: [0] * (len(LATENCY) + 1))
    total: float = 0.0
    count: int = 0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.buckets[bisect_left(LATENCY, seconds)] += 1
        self.total += seconds
        self.count += 1

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Give the samples."""
        so_far = 0
        for bound, count in zip((*map(str, LATENCY), "+Inf"), self.buckets, strict=True):
            so_far += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {so_far}'
        yield f"{name}_sum{{{labels}}} {self.total:.6f}"
        yield f"{name}_count{{{labels}}} {self.count}"


@define
class Clocked:
    """When a request arrived and gave its last token so far; 0 before there was one."""

    arrived: float
    prompt: str
    last: float = 0.0


class Figures:
    """Counts what a batcher's requests and steps do. Times are of this process's monotonic clock."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._counters: Counter[str] = Counter()
        self._requests: dict[str, Clocked] = {}
        self._stats = StepStats()

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """A request was taken."""
        self._requests[request_id] = Clocked(time.monotonic(), length_bucket(prompt_tokens))

    def stepped(self, output: StepOutput) -> None:
        """A step has ended."""
        now = time.monotonic()
        stats, outputs = output.stats, output.outputs
        began = now - stats.forward_seconds - stats.sampling_seconds - stats.python_seconds
        self._stats = stats
        for name in output.admitted:
            self._left_the_queue(name, began)
        self._counters["prompt_tokens"] += stats.prefilled
        self._counters["generation_tokens"] += sum(len(output.tokens) for output in outputs)
        self._counters["num_preemptions"] += stats.preemptions
        self._counters["prefix_cache_queries"] += stats.prefix_queried
        self._counters["prefix_cache_hits"] += stats.prefix_hits
        self._counters["engine_steps"] += 1
        self._observe("engine_step_forward_seconds", "all", stats.forward_seconds)
        self._observe("engine_step_sampling_seconds", "all", stats.sampling_seconds)
        self._observe("engine_step_python_seconds", "all", stats.python_seconds)
        for one in outputs:
            self._saw(one, now)

    def _left_the_queue(self, name: str, began: float) -> None:
        request = self._requests.get(name)
        if request is not None:
            waited = max(0.0, began - request.arrived)
            self._observe("request_queue_time_seconds", request.prompt, waited)

    def _saw(self, output: SequenceOutput, now: float) -> None:
        request = self._requests.get(output.id)
        if request is None:
            return
        if output.tokens:
            since, name = request.last, "inter_token_latency_seconds"
            if not since:
                since, name = request.arrived, "time_to_first_token_seconds"
            self._observe(name, request.prompt, now - since)
            request.last = now
        if output.finish:
            del self._requests[output.id]
            self._observe("e2e_request_latency_seconds", request.prompt, now - request.arrived)
            self._counters[f"request_{output.finish}"] += 1

    def _observe(self, name: str, prompt: str, seconds: float) -> None:
        self._histograms.setdefault((name, prompt), Histogram()).observe(seconds)

    def lines(self, actor: str, running: int, waiting: int) -> tuple[str, ...]:
        """Return every sample. `actor` tells the batchers of one model apart."""
        model = f'actor="{actor}",model_name="{self._model}"'
        stats = self._stats
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        lines = [
            f"antiphon_num_requests_running{{{model}}} {running}",
            f"antiphon_num_requests_waiting{{{model}}} {waiting}",
            f"antiphon_kv_cache_usage_perc{{{model}}} {usage:.6f}",
        ]
        lines += [
            f"antiphon_{name}_total{{{model}}} {value}" for name, value in sorted(self._counters.items())
        ]
        for (name, prompt), histogram in sorted(self._histograms.items()):
            lines += histogram.lines(f"antiphon_{name}", f'{model},prompt_length="{prompt}"')
        return tuple(lines)
