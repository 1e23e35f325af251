"""What a chaos run shows: a live table while it runs, and the report at its end."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

import attrs
from attrs import define, field
from rich.console import Console
from rich.table import Table

from scripts.chaos.record import Evidence, Fired, Violation


@define
class Progress:
    """The run so far. Written by the runner's threads, read by the live view."""

    plan: str
    seed: int
    turns_planned: int
    faults_planned: int
    turns: list[Evidence] = field(factory=list)
    fired: list[Fired] = field(factory=list)
    not_fired: list[str] = field(factory=list)
    violations: list[Violation] = field(factory=list)

    @property
    def good(self) -> bool:
        """Every planned fault fired, at least the planned turns ran, and no invariant broke."""
        whole = len(self.fired) == self.faults_planned and len(self.turns) >= self.turns_planned
        return whole and not self.not_fired and not self.violations

    def live(self) -> Table:
        """Return the live table."""
        table = Table(title=f"chaos {self.plan}, seed {self.seed}", box=None)
        table.add_column("what")
        table.add_column("so far", justify="right")
        table.add_row("turns", f"{len(self.turns)} / {self.turns_planned}")
        for outcome, count in sorted(Counter(t.outcome for t in self.turns).items()):
            table.add_row(f"  {outcome}", str(count))
        table.add_row("faults", f"{len(self.fired)} / {self.faults_planned}")
        for (kind, target), (count, recovery) in self.by_fault().items():
            table.add_row(f"  {kind} {target}", f"{count}   {recovery}")
        table.add_row("violations", str(len(self.violations)))
        return table

    def by_fault(self) -> dict[tuple[str, str], tuple[int, str]]:
        """Return, for each kind and target, how many fired and the recovery: median and worst in seconds."""
        grouped: dict[tuple[str, str], list[Fired]] = {}
        for fired in self.fired:
            grouped.setdefault((fired.kind, fired.target), []).append(fired)
        return {key: (len(found), _recovery(found)) for key, found in sorted(grouped.items())}

    def recovery(self, batcher: bool) -> dict[str, float]:
        """Return p50, p99 and worst recovery in seconds, of the batcher's kills or of all others'."""
        times = sorted(
            f.recovered
            for f in self.fired
            if f.recovered is not None and ("batcher" in f.target) is batcher and f.kind == "kill"
        )
        if not times:
            return {}
        return {
            "count": len(times),
            "p50": statistics.median(times),
            "p99": times[min(len(times) - 1, int(len(times) * 0.99))],
            "worst": times[-1],
        }

    def as_json(self) -> str:
        """Return the report for machines."""
        body: dict[str, Any] = {
            "plan": self.plan,
            "seed": self.seed,
            "good": self.good,
            "turns": {
                "planned": self.turns_planned,
                "ran": len(self.turns),
                "outcomes": Counter(t.outcome for t in self.turns),
            },
            "faults": {
                "planned": self.faults_planned,
                "fired": [attrs.asdict(f) for f in self.fired],
                "not_fired": self.not_fired,
            },
            "recovery_s": {"batcher": self.recovery(batcher=True), "others": self.recovery(batcher=False)},
            "violations": [attrs.asdict(v) for v in self.violations],
        }
        return json.dumps(body, indent=2)

    def print(self, console: Console) -> None:
        """Print the report for people."""
        console.print(self.live())
        for name, figures in (
            ("batcher", self.recovery(batcher=True)),
            ("others", self.recovery(batcher=False)),
        ):
            if figures:
                console.print(
                    f"recovery after a kill, {name}: "
                    + ", ".join(f"{k} {v:.2f}" if k != "count" else f"{v} kills" for k, v in figures.items()),
                    highlight=False,
                )
        for text in self.not_fired:
            console.print(f"[red]not fired[/]: {text}", highlight=False)
        for violation in self.violations:
            console.print(f"[red]invariant {violation.invariant}[/]: {violation.what}", highlight=False)
        console.print(
            "[green]no invariant broke, every fault fired" if self.good else "[red]the run is not clean"
        )


def _recovery(found: list[Fired]) -> str:
    times = [f.recovered for f in found if f.recovered is not None]
    return f"p50 {statistics.median(times):.2f} s, worst {max(times):.2f} s" if times else ""
