"""What a person did or has that stops a command: one line that says what to do, exit code 2."""

from __future__ import annotations


class UsageFault(Exception):
    """A wrong flag, file, port or state. The text is the whole message: what, where, and how to mend it."""
