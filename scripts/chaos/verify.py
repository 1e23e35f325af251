"""The invariants A to H, checked from outside on what the clients saw, the books, the figures and the machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.chaos.record import Evidence, Fired, Violation

RECOVERY_LIMIT = 2.0
"""Seconds to the first good answer after a kill (a batcher's: plus model load)."""
CANARY = "canary-{owner}-{number}"


def check_turns(turns: Iterable[Evidence], golden: Mapping[int, str]) -> list[Violation]:
    """A: each ends once. B: every connection saw a prefix of the golden text, the last the whole."""
    broken = []
    for turn in turns:
        where = f"{turn.client} turn {turn.response_id or '?'} ({turn.question.text[:40]!r})"
        whole = golden[turn.question.number]
        if turn.outcome == "never ended":
            broken.append(Violation("A", f"{where} never ended: {turn.detail}"))
        if turn.outcome == "error":
            broken.append(Violation("A", f"{where} ended in an error: {turn.detail}"))
        broken += [
            Violation("B", f"{where} connection {number}: saw {seen[-60:]!r}, no prefix of the golden text")
            for number, seen in enumerate(turn.attempts)
            if not whole.startswith(seen)
        ]
        if turn.outcome == "done" and turn.text != whole:
            broken.append(Violation("B", f"{where} ended with {len(turn.text)} of {len(whole)} characters"))
    return broken


def check_canaries(turns: Sequence[Evidence], owners: int) -> list[Violation]:
    """D: no owner's canary appears in another's text."""
    return [
        Violation("D", f"turn {turn.response_id} of owner {turn.owner} holds a canary of owner {owner}")
        for turn in turns
        for owner in range(owners)
        if owner != turn.owner and f"canary-{owner}-" in " ".join(turn.attempts).lower()
    ]


def check_books(turns: Iterable[Evidence], charged: Mapping[str, tuple[int, int]]) -> list[Violation]:
    """C: each finished turn is charged for exactly what its client was told. `charged`: request → (prompt, completion)."""
    broken = []
    for turn in turns:
        if turn.outcome != "done" or turn.completion_tokens is None:
            continue
        request = turn.response_id.removeprefix("chatcmpl-").removeprefix("resp_")
        told = (turn.prompt_tokens, turn.completion_tokens)
        if charged.get(request) != told:
            broken.append(
                Violation(
                    "C", f"turn {request}: the client was told {told}, the books say {charged.get(request)}"
                )
            )
    return broken


def check_figures(metrics: str) -> list[Violation]:
    """C: no reservation is open. E: no check was skipped. F: nothing runs, no KV block is in use."""
    broken = []
    for invariant, name in (
        ("C", "antiphon_limiter_open_reservations"),
        ("E", "antiphon_session_safety_check_skipped_total"),
        ("F", "antiphon_num_requests_running"),
        ("F", "antiphon_num_requests_waiting"),
        ("F", "antiphon_kv_cache_usage_perc"),
        ("F", "antiphon_session_turns_open"),
    ):
        values = [
            float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", metrics, re.MULTILINE)
        ]
        if not values:
            broken.append(Violation(invariant, f"/metrics has no {name}"))
        elif sum(values):
            broken.append(Violation(invariant, f"{name} is {sum(values):g} after all was quiet"))
    return broken


def check_recovery(fired: Iterable[Fired]) -> list[Violation]:
    """G: a good answer within the limit of each kill; a batcher's and the whole tree's also load the model."""
    return [
        Violation(
            "G", f"{f.kind} {f.target}: {'no good answer' if f.recovered is None else f'{f.recovered:.2f} s'}"
        )
        for f in fired
        if f.kind == "kill"
        and (
            f.recovered is None
            or f.recovered > (RECOVERY_LIMIT if "batcher" not in f.target else RECOVERY_LIMIT + 8)
        )
    ]


def check_left_over(state: Path) -> list[Violation]:
    """F: after the stop no process has a file of the state directory open, and no socket or half-written file is left."""
    left = [
        *state.glob("run/*.ipc"),
        *state.glob("run/*.real"),
        *state.glob("run/*.sock"),
        *state.rglob("*.part"),
    ]
    broken = [Violation("F", f"file {path.name} is left") for path in left]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and any(target.startswith(str(state)) for target in _open_files(entry)):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")[:120]
            broken.append(Violation("F", f"process {entry.name} is left: {command!r}"))
    return broken


def _open_files(process: Path) -> list[str]:
    try:
        return [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
    except OSError:
        return []  # it ended while we looked


def outcomes(turns: Iterable[Evidence]) -> Counter[str]:
    """Count how the turns ended."""
    return Counter(turn.outcome for turn in turns)
