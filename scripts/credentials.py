"""`<state>/credentials`: the two lines that point an OpenAI client at this installation."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from scripts.failure import UsageFault

_MEND = "restore it, or move it away, which loses the key in it; `antiphon keys create` makes another"


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
    """Read them back. Raises `UsageFault` when there are none, and when they cannot be read."""
    path = path_of(state)
    try:
        text = path.read_text(encoding="utf-8")
        pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return Credentials(pairs["OPENAI_BASE_URL"], pairs["OPENAI_API_KEY"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageFault(
            f"{path}: no credentials here; start a server with: antiphon serve --state {state}"
        ) from error
    except OSError as error:
        raise UsageFault(f"{path} cannot be read ({error.strerror}): {_MEND}") from error
    except UnicodeDecodeError as error:
        raise UsageFault(f"{path} is damaged (not UTF-8): {_MEND}") from error
    except KeyError as error:
        raise UsageFault(f"{path} is damaged (it has no line {error.args[0]}=…): {_MEND}") from error
