"""Where things that can always be made again are kept: compiled kernels, weights in the kernels' layout."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$ANTIPHON_CACHE`, or `antiphon` in the user's cache directory. It may not exist yet."""
    if chosen := os.environ.get("ANTIPHON_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "antiphon"
