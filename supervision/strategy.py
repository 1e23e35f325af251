"""What one child's death means for its siblings, and for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from supervision.spec import Restart, Strategy

T = TypeVar("T")


def affected(strategy: Strategy, children: Sequence[T], dead: T) -> list[T]:
    """Return the children to stop and start again for the dead one, itself included, in start order."""
    if strategy == "one_for_all":
        return list(children)
    if strategy == "rest_for_one":
        return list(children[children.index(dead) :])
    return [dead]


def comes_back(restart: Restart, *, failed: bool) -> bool:
    """Whether a child that ended by itself is started again; `failed`: not with a clean exit."""
    return restart == "permanent" or (restart == "transient" and failed)
