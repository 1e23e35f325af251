"""What the supervisor and a child say to each other on the descriptor the child inherits.

A `SOCK_SEQPACKET` pair: every report is whole or absent, in both directions. The child's end of file is
the supervisor's death.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import field, frozen

from supervision import wire
from supervision.errors import SupervisionError
from supervision.tree import Tree

MAX_REPORT = 128 * 1024
"""Bytes of one report, under what a unix socket's buffer takes in one piece."""


class ReportTooLarge(SupervisionError):
    """A child's settings or the tree do not fit one report."""


@frozen
class Pattern:
    """The first word to a template: what its children will be."""

    actor: str
    settings: Mapping[str, Any] = field(factory=dict)


@frozen
class Birth:
    """The first word to a child: who it is."""

    name: str
    epoch: int
    actor: str
    state_dir: str
    grace: float
    heartbeat: float
    tree: Tree
    settings: Mapping[str, Any] = field(factory=dict)
    files: Mapping[str, int] = field(factory=dict)


@frozen
class Push:
    """The newest tree."""

    tree: Tree


@frozen
class Ready:
    """The child's `on_start` has returned."""


@frozen
class Beat:
    """The child's loop turns. `depth` is the messages in its mailbox."""

    progress: int
    busy: bool
    depth: int


@frozen
class Dying:
    """The child's last words: why it ends, in one line and without message text."""

    reason: str


Report = Pattern | Birth | Push | Ready | Beat | Dying
_KINDS: Mapping[str, type[Report]] = {cls.__name__: cls for cls in (Pattern, Birth, Push, Ready, Beat, Dying)}


def encode(report: Report) -> bytes:
    """Return a report's bytes. Raises `ReportTooLarge`."""
    data = msgspec.msgpack.encode((type(report).__name__, report))
    if len(data) > MAX_REPORT:
        raise ReportTooLarge(
            f"{type(report).__name__} has {len(data)} bytes, at most {MAX_REPORT} fit: shorten it"
        )
    return data


def decode(data: bytes) -> Report:
    """Return the report in `data`; both ends are of one installation, so anything else is a bug."""
    kind, plain = msgspec.msgpack.decode(data)
    report: Report = wire.structure(plain, _KINDS[kind])
    return report
