"""The tree as data: what the supervisor runs, printed by `antiphon ps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
Restart = Literal["permanent", "transient", "temporary"]


@frozen
class ChildSpec:
    """One actor to run. Durations are in seconds.

    `actor` is `"package.module:Class"`. `settings` is what `Class.Settings` is structured from.
    `files` maps a name to a descriptor of the supervisor that the child inherits under the same number.
    """

    name: str
    actor: str
    settings: Mapping[str, Any] = field(factory=dict)
    restart: Restart = "permanent"
    grace: float = 5.0
    """From SIGTERM to SIGKILL."""
    ready_within: float = 60.0
    """From spawn to readiness; past it the child is killed and counted as a crash."""
    heartbeat: float = 1.0
    """A beat is due this often; two missed in a row mean stopped: killed."""
    watchdog: float = 10.0
    """Busy without progress for this long means stuck: killed."""
    files: Mapping[str, int] = field(factory=dict)


@frozen
class SupervisorSpec:
    """A group of children, or of groups, and what one's death means for the others."""

    name: str
    strategy: Strategy
    children: tuple[ChildSpec | SupervisorSpec, ...]
    intensity: int = 5
    """More restarts than this within `window` and the group is stopped and the failure escalates.

    Those of a child that was never ready count beyond the window.
    """
    window: float = 10.0
    backoff: float = 0.05
    """Delay before a child's second restart within the window, doubled with each more, with jitter; none before its first."""
    backoff_limit: float = 2.0
