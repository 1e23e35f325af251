"""`/metrics`: the figures of every actor, as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import trio

from actors.protocol import Metrics, ReadMetrics
from supervision.actor import Context
from supervision.errors import AskFailed

ASK_SECONDS = 1.0


class Figures:
    """The edge's own counters, by sample name with labels."""

    def __init__(self, edge: str) -> None:
        self._edge = edge
        self._counts: Counter[str] = Counter()

    def count(self, name: str, *, by: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self._counts[self._sample(name, labels)] += by

    def lines(self, gauges: dict[str, float]) -> tuple[str, ...]:
        """Return all samples, with these gauges."""
        made = [f"{self._sample(name, {})} {value:g}" for name, value in gauges.items()]
        return (*made, *(f"{name} {value}" for name, value in sorted(self._counts.items())))

    def _sample(self, name: str, labels: dict[str, str]) -> str:
        shown = ",".join(f'{key}="{value}"' for key, value in {"actor": self._edge, **labels}.items())
        return f"antiphon_edge_{name}{{{shown}}}"


async def gather(context: Context, own: Iterable[str]) -> str:
    """Ask every actor that is up, and return what they said. One that does not answer is missing."""
    found: dict[str, tuple[str, ...]] = {context.name: tuple(own)}
    names = [m.name for m in context.tree.members.values() if m.state == "up" and m.name != context.name]
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(_ask, context, name, found)
    up = [f'antiphon_up{{actor="{m.name}"}} {int(m.state == "up")}' for m in context.tree.members.values()]
    return "\n".join([*up, *_lines(found)]) + "\n"


async def _ask(context: Context, name: str, found: dict[str, tuple[str, ...]]) -> None:
    try:
        reply = await context.ask(name, ReadMetrics(), timeout=ASK_SECONDS)
    except AskFailed:
        return
    if isinstance(reply, Metrics):
        found[name] = reply.lines


def _lines(found: dict[str, tuple[str, ...]]) -> list[str]:
    """Join the actors' lines; a comment (`# TYPE …`) that several of them send is said once."""
    made: list[str] = []
    said: set[str] = set()
    for name in sorted(found):
        for line in found[name]:
            if line.startswith("#") and line in said:
                continue
            said.add(line)
            made.append(line)
    return made
