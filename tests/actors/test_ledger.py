"""The ledger as others see it: durable before it answers, and deaf to repetition."""

import sqlite3

import pytest
import sqlalchemy as sa
import trio
from trio.testing import MockClock

from actors.ledger import Ledger, LedgerSettings, PriceSettings
from actors.protocol import Charge, Charged, Metrics, ReadMetrics, Waive, Witness, WitnessEvent
from store.books import Books
from store.books_reconcile import reconcile
from supervision.errors import ActorDown
from supervision.local import LocalTree

SETTINGS = LedgerSettings(prices=(PriceSettings("*", prompt=1_000_000, completion=1_000_000, fast_answer=5),))


def in_tree(test):
    """Run an async test in a tree of its own, on a clock that stands still: a slow disk is no timeout."""

    def run(tmp_path):
        async def body():
            async with LocalTree(state_dir=tmp_path) as tree:
                await test(tree, tmp_path)

        trio.run(body, clock=MockClock())

    run.__name__ = test.__name__
    return run


def charge(request_id="r", spans=((0, 0, 10),), **changes) -> Charge:
    facts = {
        "account": "acme",
        "key_id": "k",
        "model": "m",
        "prompt_tokens": 7,
        "cached_tokens": 0,
        **changes,
    }
    return Charge(request_id=request_id, spans=tuple(spans), **facts)


def owed(path) -> int:
    books = Books(path / "books.sqlite")
    micros = sum(b.micros for b in books.balances("acme"))
    books.close()
    return micros


def drifts(path) -> list[str]:
    books = Books(path / "books.sqlite")
    found = [drift.kind for drift in reconcile(books, settled_before=2**60).drifts]
    books.close()
    return found


@in_tree
async def test_a_charge_is_in_the_books_when_it_is_acknowledged(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    assert await client.ask("ledger", charge(), timeout=5) == Charged("r", 17)
    assert owed(path) == 17


@in_tree
async def test_a_repeated_charge_adds_nothing_also_after_a_kill(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    await client.ask("ledger", charge(), timeout=5)
    await tree.restart("ledger", Ledger(SETTINGS))
    assert await client.ask("ledger", charge(), timeout=5) == Charged("r", 0)
    assert owed(path) == 17


@in_tree
async def test_charges_that_come_together_share_transactions_and_each_gets_its_own_answer(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    answers = {}

    async def ask(number):
        answers[number] = await client.ask("ledger", charge(f"r{number}", [(0, 0, number + 1)]), timeout=60)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(ask, number)
    assert answers == {n: Charged(f"r{n}", 8 + n) for n in range(200)}
    lines = (await client.ask("ledger", ReadMetrics(), timeout=5)).lines
    figures = dict(line.rsplit(" ", 1) for line in lines)
    assert figures["antiphon_ledger_acts_total"] == "200"
    assert int(figures["antiphon_ledger_transactions_total"]) < 100
    assert owed(path) == sum(8 + n for n in range(200))


@in_tree
async def test_stopping_finishes_what_was_asked(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    for number in range(50):
        await client.tell("ledger", charge(f"r{number}"))
    await client.ask("ledger", ReadMetrics(), timeout=5)
    await tree.stop("ledger")
    assert owed(path) == 50 * 17


@in_tree
async def test_a_disk_error_ends_the_ledger_and_nobody_is_told_it_was_written(tree, path):
    ledger = Ledger(SETTINGS)
    await tree.start("ledger", ledger)
    client = tree.client("test.0")

    def broken(*_):
        raise sa.exc.OperationalError("COMMIT", {}, sqlite3.OperationalError("disk I/O error"))

    ledger._books.enter = broken
    with pytest.raises(ActorDown):
        await client.ask("ledger", charge(), timeout=5)
    assert "disk I/O error" in str(await tree.crash_of("ledger"))
    await tree.restart("ledger", Ledger(SETTINGS))
    assert await client.ask("ledger", charge(), timeout=5) == Charged("r", 17)


@in_tree
async def test_a_witness_is_acknowledged_and_heard_once(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    event = WitnessEvent("e1", "r", 0, "acme", "m", 7, 0, 10)
    for _ in range(2):
        assert await client.ask("ledger", Witness((event, event)), timeout=5) == Charged("r", 0)
    await client.ask("ledger", charge(), timeout=5)
    books = Books(path / "books.sqlite")
    assert books.witness([], 0) == 0
    with books.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM witness")).scalar_one() == 1
    books.close()


@in_tree
async def test_a_waiver_is_durable_when_it_is_acknowledged_and_may_be_repeated(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    await client.ask("ledger", Witness((WitnessEvent("e1", "r", 0, "acme", "m", 7, 0, 10),)), timeout=5)
    assert drifts(path) == ["uncharged"]
    for _ in range(2):
        assert await client.ask("ledger", Waive("r", "acme"), timeout=5) == Charged("r", 0)
    assert drifts(path) == []


@in_tree
async def test_an_impossible_charge_harms_no_one_and_stays_in_sight(tree, path):
    await tree.start("ledger", Ledger(SETTINGS))
    client = tree.client("test.0")
    assert await client.ask("ledger", charge("bad", [(0, 9, 3)]), timeout=5) == Charged("bad", 0)
    assert await client.ask("ledger", charge(), timeout=5) == Charged("r", 17)
    metrics = await client.ask("ledger", ReadMetrics(), timeout=5)
    assert isinstance(metrics, Metrics)
    assert "antiphon_ledger_refused_total 1" in metrics.lines
