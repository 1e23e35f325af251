"""`<state>/credentials`: the two lines that point an OpenAI client at this installation."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from scripts.failure import UsageFault


@frozen
class Credentials:
    """Where to ask, and with which key."""

    base_url: str
    api_key: str

    def lines(self) -> str:
        """Return the file's text, ready to be sourced by a shell."""
        return f"OPENAI_BASE_URL={self.base_url}\nOPENAI_API_KEY={self.api_key}\n"


def path_of(state: Path) -> Path:
    """Return where a state directory keeps them."""
    return state / "credentials"


def write(state: Path, credentials: Credentials) -> None:
    """Put them in place whole, readable by the owner alone."""
    part = path_of(state).with_suffix(".part")
    with os.fdopen(
        os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as sink:
        sink.write(credentials.lines())
    part.replace(path_of(state))


def read(state: Path) -> Credentials:
    """Read them back. Raises `UsageFault` when there are none."""
    path = path_of(state)
    try:
        pairs = dict(
            line.split("=", 1) for line in path.read_text(encoding="utf-8").splitlines() if "=" in line
        )
        return Credentials(pairs["OPENAI_BASE_URL"], pairs["OPENAI_API_KEY"])
    except (OSError, KeyError) as error:
        raise UsageFault(
            f"{path}: no credentials here; start a server with: antiphon serve --state {state}"
        ) from error
