"""Putting files on the disk so that they are there after power loss, whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

INCOMING: Final = ".incoming-"
"""How the name of a file or directory begins that is not in its place yet. What a kill leaves has it too."""

Checkpoint = Callable[[str], None]
"""Called with the name of each step once it is done: where a test kills."""


def go_on(_step: str) -> None:
    """Do nothing at a checkpoint."""


def flush(path: Path) -> None:
    """Put a file's or a directory's bytes on the disk. Raises `OSError` if they are not there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, checkpoint: Checkpoint = go_on) -> None:
    """Replace a file by rename, flushed: readers see the old or the new, also after power loss."""
    descriptor, name = tempfile.mkstemp(prefix=INCOMING, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        checkpoint(f"wrote {path.name}")
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    checkpoint(f"renamed {path.name}")
    flush(path.parent)
