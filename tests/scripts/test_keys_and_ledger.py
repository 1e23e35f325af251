"""`antiphon keys` and `antiphon ledger`, as a person and a program use them."""

import argparse
import csv
import json
import sqlite3

import pytest

from scripts import keys_cli, ledger_cli
from scripts.failure import UsageFault
from store.accounts import Accounts
from store.books import Books, Witnessed
from store.books_posting import Delivery
from store.prices import Price


@pytest.fixture
def antiphon(tmp_path, capsys):
    """Run a command on this state; returns its exit code and what it printed."""

    def run(*words):
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers(required=True)
        keys_cli.add_parser(subparsers)
        ledger_cli.add_parser(subparsers)
        args = parser.parse_args([*words[:2], "--state", str(tmp_path), *words[2:]])
        code = args.handler(args)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def books(tmp_path):
    opened = Books(tmp_path / "books.sqlite")
    opened.publish([Price("*", completion=1_000_000)], 0)
    opened.enter([Delivery(f"r{i}", "acme", "k", "m", 5, 0, ((0, 0, 10),)) for i in range(3)], 1)
    yield opened
    opened.close()


def test_a_key_made_listed_and_revoked(antiphon, tmp_path):
    code, out = antiphon("keys", "create", "--json", "--account", "acme", "--concurrency", "2", "--admin")
    made = json.loads(out)
    accounts = Accounts(tmp_path / "accounts.sqlite")
    identity = accounts.verify(made["secret"])
    assert (code, identity.account, identity.admin, identity.limits.concurrency) == (0, "acme", True, 2)
    _, out = antiphon("keys", "list")
    assert made["key_id"] in out
    assert made["secret"] not in out
    assert antiphon("keys", "revoke", made["key_id"])[0] == 0
    assert accounts.verify(made["secret"]) is None
    (listed,) = json.loads(antiphon("keys", "list", "--json")[1])["keys"]
    assert listed["revoked"] is not None
    accounts.close()


def test_a_wrong_key_or_state_is_one_line_that_says_what_to_do(antiphon):
    with pytest.raises(UsageFault, match="keys create"):
        antiphon("keys", "list")
    with pytest.raises(UsageFault, match="antiphon serve"):
        antiphon("ledger", "balance")
    antiphon("keys", "create")
    with pytest.raises(UsageFault, match="keys list"):
        antiphon("keys", "revoke", "key_nope")


@pytest.mark.parametrize("words", ["keys create", "keys list", "keys revoke key_1"])
def test_damaged_accounts_are_one_line_that_says_what_is_lost(antiphon, tmp_path, words):
    file = tmp_path / "accounts.sqlite"
    file.write_bytes(b"no database" * 100)
    with pytest.raises(UsageFault, match=r"not a database.*restore it.*loses every key") as refused:
        antiphon(*words.split())
    assert str(file) in str(refused.value)


def test_damage_that_shows_only_when_it_is_read_is_one_line_too(antiphon, books, tmp_path):
    with sqlite3.connect(tmp_path / "books.sqlite") as other:
        other.execute("ALTER TABLE entries RENAME COLUMN micros TO cents")
    other.close()
    with pytest.raises(UsageFault, match=r"books\.sqlite is damaged.*no such column"):
        antiphon("ledger", "entries")


def test_a_file_another_program_holds_is_not_called_damaged(antiphon, tmp_path, monkeypatch):
    monkeypatch.setattr("store.sqlite.BUSY_MS", 0)
    antiphon("keys", "create")
    with sqlite3.connect(tmp_path / "accounts.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageFault, match=r"cannot be used \(database is locked\)"):
            antiphon("keys", "create")
    other.close()


def test_a_key_needs_an_account(antiphon, capsys):
    with pytest.raises(SystemExit):
        antiphon("keys", "create", "--account", "")
    assert "must not be empty" in capsys.readouterr().err


def test_balances_sum_to_nothing(antiphon, books):
    balances = json.loads(antiphon("ledger", "balance", "--json")[1])["balances"]
    assert {b["account"]: b["micros"] for b in balances} == {"acme": 30, "@revenue": -30}
    assert "acme" in antiphon("ledger", "balance")[1]


def test_entries_are_the_newest_of_what_was_asked(antiphon, books):
    entries = json.loads(antiphon("ledger", "entries", "--json", "--account", "acme", "--limit", "2")[1])[
        "entries"
    ]
    assert [e["request_id"] for e in entries] == ["r1", "r2"]
    assert "r0" in antiphon("ledger", "entries", "--request", "r0")[1]


def test_export_has_every_entry_in_both_forms(antiphon, books, tmp_path):
    target = tmp_path / "out.csv"
    assert antiphon("ledger", "export", "--output", str(target))[0] == 0
    rows = list(csv.DictReader(target.open()))
    lines = [json.loads(line) for line in antiphon("ledger", "export", "--json")[1].splitlines()]
    assert len(rows) == len(lines) == 6
    assert sum(int(row["micros"]) for row in rows) == sum(line["micros"] for line in lines) == 0


def test_reconciling_exits_1_on_drift_and_0_without(antiphon, books):
    code, out = antiphon("ledger", "reconcile", "--grace", "0")
    assert (code, "unwitnessed: r0" in out) == (1, True)
    books.witness([Witnessed(f"e{i}", f"r{i}", 0, "acme", "m", 5, 0, 12) for i in range(3)], 2)
    code, out = antiphon("ledger", "reconcile", "--grace", "0", "--json")
    report = json.loads(out)
    assert (code, report["agrees"], report["charged_tokens"], report["undelivered_tokens"]) == (
        0,
        True,
        30,
        6,
    )
