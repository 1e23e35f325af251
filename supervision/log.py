"""Structured logs: one JSON object a line, with facts and never a message's text."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import TextIO

from supervision.errors import CannotGoOn

_TIME = "%Y-%m-%dT%H:%M:%S"


class JsonLines(logging.Formatter):
    """Formats a record as one JSON line; facts come as `extra={"fields": {…}}`.

    Of an exception only its type and place are written: its words may quote what a user said.
    """

    def __init__(self, actor: str, epoch: int) -> None:
        super().__init__()
        self._actor = actor
        self._epoch = epoch

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, object] = {
            "time": f"{time.strftime(_TIME, time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "actor": self._actor,
            "epoch": self._epoch,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = describe(record.exc_info[1])
            line["frames"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(innermost(record.exc_info[1]).__traceback__)
            ]
        return json.dumps(line, default=str)


def install(actor: str, epoch: int, stream: TextIO = sys.stderr) -> None:
    """Send this process's log to `stream`, which the supervisor has pointed at the actor's log file."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(actor, epoch))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def innermost(error: BaseException) -> BaseException:
    """Return the first exception that is not a group: nurseries wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException, *, with_words: bool = False) -> str:
    """Return an exception as one line: its type and place, and its words where they hold no user's text."""
    error = innermost(error)
    if isinstance(error, CannotGoOn):
        return _words(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    words = _words(error)
    return f"{type(error).__name__}: {words}" if with_words and words else f"{type(error).__name__}{place}"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
