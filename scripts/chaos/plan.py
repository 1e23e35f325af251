"""A chaos plan: how much traffic, which faults, how many of each. Everything else follows from the seed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import cattrs
from attrs import field, frozen

from scripts.failure import UsageFault

PLANS = Path(__file__).resolve().parent.parent / "plans"

FaultKind = Literal[
    "kill",
    "kill_twice",
    "stop",
    "pause",
    "spin",
    "kill_supervisor",
    "clock_step",
    "disk_full",
    "slow_disk",
    "frames",
    "poison",
]


@frozen
class FaultPlan:
    """`count` faults of one kind. `targets` are actor kinds (`batcher`, `session`), drawn in turn; empty: all.

    `kill_twice` kills again while the successor starts. `pause` is SIGSTOP and, before the watchdog, SIGCONT.
    `slow_disk` makes every commit and flush of every actor take 200 to 500 ms for `seconds`. `poison` is a request
    that kills the batcher that takes it on, and must be refused after two.
    `frames` puts a proxy before the target's mailbox for `seconds` and does what `frames` names to what passes.
    """

    kind: FaultKind
    count: int = 1
    targets: tuple[str, ...] = ()
    seconds: float = 1.0
    frames: tuple[Literal["drop", "delay", "duplicate", "reorder", "truncate"], ...] = ()


@frozen
class Plan:
    """What to do, and how many turns to do it under. `clients` are the kinds of client, drawn in turn."""

    name: str
    turns: int
    """At least; the clients go on while faults are left."""
    concurrency: int = 8
    clients: tuple[Literal["sse", "websocket", "sdk", "sdk_whole"], ...] = (
        "sse",
        "websocket",
        "sdk",
        "sdk_whole",
    )
    max_tokens: int = 48
    disconnects: float = 0.0
    """Share of turns whose client breaks its connection at a random point and comes back."""
    abandon: float = 0.0
    """Share of turns whose client leaves for good."""
    hostile: float = 0.0
    """Share of requests that are followed by a hostile one."""
    pace: float = 0.5
    """Mean seconds between two faults."""
    seeded: float = 0.5
    """Share of turns sampled at temperature 1 with a seed; the others are greedy."""
    faults: tuple[FaultPlan, ...] = ()
    serve: dict[str, str] = field(factory=dict)
    """Settings for the plan's own tree."""


def load(name: str) -> Plan:
    """Return a plan by name or path. Raises `UsageFault` that says what is wrong with it."""
    path = Path(name) if name.endswith(".toml") else PLANS / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in PLANS.glob("*.toml")))
        raise UsageFault(f"no plan {name!r}; known are {known}, or give a .toml file")
    converter = cattrs.Converter(forbid_extra_keys=True)
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return converter.structure({"name": path.stem, **data}, Plan)
    except (tomllib.TOMLDecodeError, cattrs.BaseValidationError, ValueError) as error:
        reasons = (
            "; ".join(cattrs.transform_error(error))
            if isinstance(error, cattrs.BaseValidationError)
            else str(error)
        )
        raise UsageFault(f"plan {path}: {reasons}") from error


def planned(plan: Plan) -> int:
    """Return how many faults must fire for the run to count."""
    return sum(f.count for f in plan.faults)


FAULT_KINDS: tuple[str, ...] = get_args(FaultKind)
