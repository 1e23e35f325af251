"""What a benchmark reports: rows with a floor and an aim, the machine, the versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from rich.console import Console
from rich.table import Table

VERSIONED = ("antiphon", "trio", "pynng", "quart", "hypercorn", "cattrs", "numpy", "numba", "lmdb", "openai")


@frozen
class Row:
    """One figure. `value` None means the row was not run, and `note` says why.

    `low` and `high` are the least and the greatest over the rounds whose median is `value`.
    """

    name: str
    value: float | None
    unit: str
    floor: float | None = None
    aim: float | None = None
    better: Literal["higher", "lower"] = "higher"
    low: float | None = None
    high: float | None = None
    note: str = ""

    def reaches(self, bound: float | None) -> bool | None:
        """Say whether the value is on the good side of `bound`; None when either is missing."""
        if bound is None or self.value is None:
            return None
        return self.value >= bound if self.better == "higher" else self.value <= bound


def machine() -> dict[str, Any]:
    """Return what the figures were measured on: processor, cores, memory in GiB, system."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), ""
    )
    memory = (
        Path("/proc/meminfo").read_text(encoding="utf-8") if Path("/proc/meminfo").exists() else "MemTotal: 0"
    )
    return {
        "processor": model or platform.processor(),
        "cores": info.count("processor\t"),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the installed versions that a figure can depend on."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_json(rows: Sequence[Row]) -> str:
    """Return the report for machines. `met` is against the floor; null without a floor or a value."""
    body = {
        "rows": [
            {
                "name": r.name,
                "value": r.value,
                "unit": r.unit,
                "floor": r.floor,
                "aim": r.aim,
                "met": r.reaches(r.floor),
                "low": r.low,
                "high": r.high,
                "better": r.better,
                "note": r.note,
            }
            for r in rows
        ],
        "machine": machine(),
        "versions": versions(),
    }
    return json.dumps(body, indent=2)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the report for people."""
    table = Table("what", "value", "min … max", "unit", "floor", "aim", "met")
    for r in rows:
        spread = "" if r.low is None or r.high is None else f"{r.low:.4g} … {r.high:.4g}"
        table.add_row(
            r.name,
            "not run" if r.value is None else f"{r.value:.4g}",
            spread,
            r.unit,
            _bound(r, r.floor),
            _bound(r, r.aim),
            _verdict(r),
        )
    console.print(table)
    for r in rows:
        if r.note:
            console.print(f"{r.name}: {r.note}", highlight=False)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 when a floor is missed, else 0. A row that was not run misses nothing, and says so in its note."""
    return int(any(r.reaches(r.floor) is False for r in rows))


def _bound(row: Row, bound: float | None) -> str:
    return "" if bound is None else f"{'≥' if row.better == 'higher' else '≤'} {bound:g}"


def _verdict(row: Row) -> str:
    if row.value is None or row.floor is None:
        return ""
    if row.reaches(row.floor) is False:
        return "[red]missed"
    return "[green]aim" if row.reaches(row.aim) else "[green]floor"
