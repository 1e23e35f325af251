"""Tables lose nothing: on a narrow terminal they fold, and where there is none a row is a line."""

import io
import re
from collections import Counter

import pytest
from rich.table import Column

from scripts import doctor, keys_cli, ps, tables
from store.accounts import Identity, Key
from store.limits import Limits
from supervision.status import ActorStatus

LIMITS = Limits(requests_per_minute=60, tokens_per_minute=40_000, concurrency=4, budget_tokens=9_000_000)
KEY = Key(
    Identity("acme", "key_0123456789abcdef", limits=LIMITS), "the one of the night run", 1_700_000_000, None
)
ACTOR = ActorStatus("safety_fallback", 12, 30908, "up", 1, 0, 35.0, "killed by SIGKILL")
FINDING = doctor.Finding(
    "model", "ok", "llama, context 8192 (/srv/models/a-rather-long-directory/model.gguf)"
)
SHOWN = {
    "keys": (keys_cli._table([KEY]), ["budget_tokens 9000000", "2023-11-14 22:13", "key_0123456789abcdef"]),
    "ps": (ps._table([ACTOR]), ["restarts", "safety_fallback", "30908", "killed by SIGKILL"]),
    "doctor": (doctor._table([FINDING]), ["(/srv/models/a-rather-long-directory/model.gguf)"]),
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def printed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    def show(rows, out):
        monkeypatch.setattr("sys.stdout", out)
        tables.show(rows)
        return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())

    return show


@pytest.mark.parametrize("name", SHOWN)
def test_where_there_is_no_terminal_a_row_is_one_line(printed, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "60")
    rows, words = SHOWN[name]
    shown = printed(rows, io.StringIO())
    assert [word for word in words if word not in shown] == []
    assert len(shown.splitlines()) == 2


@pytest.mark.parametrize("name", SHOWN)
def test_on_a_narrow_terminal_every_character_is_there(printed, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "50")
    rows, words = SHOWN[name]
    shown = printed(rows, Terminal())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 50
    assert Counter("".join(words)) - Counter(shown) <= Counter(" " * 20)


def test_a_name_and_a_key_stay_whole_while_other_columns_can_fold(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert "key_0123456789abcdef" in printed(SHOWN["keys"][0], Terminal())
    assert "safety_fallback" in printed(SHOWN["ps"][0], Terminal())


def test_what_looks_like_markup_is_shown_as_it_is(printed):
    rows = tables.table(Column("name", no_wrap=True))
    tables.add(rows, "a[bold]b")
    assert "a[bold]b" in printed(rows, io.StringIO())
