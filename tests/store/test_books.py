"""The books charge the union of positions, exactly, in any order, and agree with themselves."""

import itertools
import random

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from store.books import Books, Waiver, Witnessed
from store.books_posting import REVENUE, Delivery
from store.books_reconcile import reconcile
from store.books_schema import BALANCES, ENTRIES, PRICES, REQUESTS, SPANS
from store.books_spans import Positions
from store.prices import Price, Use, cost

PRICE = Price("m", prompt=150_001, cached=75_000, completion=600_007, fast_answer=50)
LATER = 10**15


@pytest.fixture
def books(tmp_path):
    opened = Books(tmp_path / "books.sqlite")
    opened.publish([PRICE], 0)
    yield opened
    opened.close()


def delivery(request_id="r", spans=((0, 0, 10),), **changes) -> Delivery:
    facts = {
        "account": "acme", "key_id": "k", "model": "m", "prompt_tokens": 7, "cached_tokens": 2, **changes,
    }  # fmt: skip
    return Delivery(request_id, spans=tuple(spans), **facts)


def owed(books: Books, account: str = "acme") -> int:
    return sum(b.micros for b in books.balances(account))


def disagreements(books: Books) -> set[str]:
    """Kinds of drift of the books with themselves, the witness left aside."""
    return {drift.kind for drift in reconcile(books, settled_before=0).drifts}


def kinds(books: Books) -> set[str]:
    return {drift.kind for drift in reconcile(books, settled_before=LATER).drifts}


def test_a_delivery_costs_its_prompt_and_its_positions(books):
    added = books.enter([delivery()], 1)
    assert added == [cost(PRICE, Use(7, 2, 10))] == [7]
    (balance,) = books.balances("acme")
    assert (balance.micros, balance.requests, balance.prompt_tokens, balance.completion_tokens) == (
        7,
        1,
        7,
        10,
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_delivery_200_times_is_one_charge(books, at_once):
    many = [delivery()] * 200
    added = books.enter(many, 1) if at_once else [books.enter([d], 1)[0] for d in many[:20]]
    assert sum(added) == owed(books) == 7
    assert len(books.entries()) == 2


def test_the_prompt_is_charged_even_when_nothing_was_generated(books):
    books.enter([delivery(f"r{i}", spans=(), prompt_tokens=1_000_000, cached_tokens=0) for i in range(3)], 1)
    assert owed(books) == 3 * 150_001


def test_cached_tokens_are_part_of_the_prompt_not_added_to_it():
    assert cost(PRICE, Use(2_000_000, 1_000_000, 0)) == 150_001 + 75_000


SPAN = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 12)).map(
    lambda s: (s[0], s[1], s[1] + s[2])
)
CHARGES = st.lists(
    st.tuples(st.sampled_from(["r0", "r1", "r2"]), st.lists(SPAN, max_size=4)), min_size=1, max_size=12
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One file for many examples, each with an account of its own."""
    opened = Books(tmp_path_factory.mktemp("books") / "b.sqlite")
    opened.publish([PRICE], 0)
    yield opened, itertools.count()
    opened.close()


@settings(max_examples=60)
@given(CHARGES, st.randoms(use_true_random=False), st.data())
def test_any_multiset_of_charges_costs_what_its_union_costs(shared, charges, rng, data):
    books, numbers = shared
    account = f"account-{next(numbers)}"
    order = [*charges, *rng.choices(charges, k=3)]
    rng.shuffle(order)
    cut = data.draw(st.integers(0, len(order)))
    added = 0
    for group in (order[:cut], order[cut:]):
        added += sum(
            books.enter([delivery(f"{account}/{r}", spans, account=account) for r, spans in group], 1)
        )
    union: dict[str, dict[int, set[int]]] = {r: {} for r, _ in charges}
    for request_id, spans in charges:
        for choice, start, end in spans:
            union[request_id].setdefault(choice, set()).update(range(start, end))
    due = sum(cost(PRICE, Use(7, 2, sum(map(len, u.values())))) for u in union.values())
    assert (owed(books, account), added) == (due, due)
    assert sum(e.micros for e in books.entries(account=account)) == due


def test_after_all_those_the_books_agree_with_themselves(shared):
    books, _ = shared
    assert disagreements(books) == set()
    assert sum(b.micros for b in books.balances()) == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=12))
def test_positions_are_sets(intervals):
    positions, members = Positions(), set()
    for start, length in intervals:
        new = positions.add(start, start + length)
        covered = {p for a, b in new for p in range(a, b)}
        assert covered == set(range(start, start + length)) - members
        members |= covered
    assert len(positions) == len(members)
    assert {p for a, b in positions.intervals for p in range(a, b)} == members
    holes = Positions.of([(3, 9), (20, 21)])
    left = {p for a, b in positions.minus(holes).intervals for p in range(a, b)}
    assert left == members - set(range(3, 9)) - {20}


def test_a_request_keeps_the_price_it_began_with(books):
    books.enter([delivery("old", [(0, 0, 1_000_000)], prompt_tokens=0, cached_tokens=0)], 1)
    books.publish([Price("m", completion=1_000_000)], 2)
    books.publish([Price("m", completion=1_000_000)], 3)
    books.enter([delivery("old", [(0, 1_000_000, 2_000_000)], prompt_tokens=0, cached_tokens=0)], 4)
    assert owed(books) == 2 * 600_007
    books.enter([delivery("new", [(0, 0, 1_000_000)], prompt_tokens=0, cached_tokens=0)], 5)
    assert owed(books) == 2 * 600_007 + 1_000_000
    assert books.price_of("m").version == 2
    assert disagreements(books) == set()


def test_prices_and_prices_at_begin_survive_reopening(books, tmp_path):
    books.enter([delivery("r", [(0, 0, 500_000)])], 1)
    again = Books(tmp_path / "books.sqlite")
    again.enter([delivery("r", [(0, 0, 1_000_000)])], 2)
    assert owed(again) == cost(PRICE, Use(7, 2, 1_000_000))
    again.close()


def test_a_fast_answer_costs_its_own_price_once(books):
    answer = delivery("f", [(0, 0, 30)], fast_answer="v1/hello")
    assert books.enter([answer, answer], 1) == [50, 0]
    assert kinds(books) == set()


def test_a_model_without_a_price_costs_nothing_and_is_counted(books):
    assert books.enter([delivery("x", model="unknown")], 1) == [0]
    assert books.balances("acme")[0].completion_tokens == 10
    assert kinds(books) == {"unwitnessed"}


def test_another_account_s_charge_for_the_same_request_is_not_entered_and_is_reported(books):
    books.enter([delivery("r"), delivery("r", [(0, 10, 20)], account="thief")], 1)
    assert owed(books) == 7
    assert owed(books, "thief") == 0
    assert "conflict" in kinds(books)


@pytest.mark.parametrize(
    "bad",
    [
        {"spans": [(0, 5, 5)]},
        {"spans": [(0, -1, 5)]},
        {"spans": [(-1, 0, 5)]},
        {"cached_tokens": 8},
        {"account": REVENUE},
        {"account": ""},
    ],
)
def test_what_cannot_be_a_delivery_is_refused(bad):
    with pytest.raises(ValueError, match="'r'"):
        delivery(**bad)


def test_no_price_has_a_fraction():
    with pytest.raises(ValueError, match="whole micro-units"):
        Price("m", prompt=0.5)


@pytest.mark.parametrize("table", [ENTRIES, SPANS, BALANCES, REQUESTS, PRICES])
def test_no_column_of_the_books_is_a_fraction(table):
    assert not [c for c in table.columns if isinstance(c.type, sa.Float | sa.Numeric)]


def test_the_walls_refuse_a_double_entry_from_anywhere(books):
    books.enter([delivery()], 1)
    (entry, _) = books.entries()
    row = {"request_id": entry.request_id, "posting": entry.posting, "account": "acme", "micros": 7, "at": 1}
    for table, double in ((ENTRIES, row), (SPANS, {"request_id": "r", "choice": 0, "start": 0, "end": 1})):
        with pytest.raises(sa.exc.IntegrityError), books._engine.begin() as connection:
            connection.execute(sa.insert(table), double)


def seen(request_id="r", spans=((0, 0, 10),), prompt_tokens=7, account="acme") -> list[Witnessed]:
    return [
        Witnessed(f"{request_id}/{i}", request_id, choice, account, "m", prompt_tokens, start, end)
        for i, (choice, start, end) in enumerate(spans)
    ]


def test_a_witness_is_heard_once(books):
    assert books.witness(seen() * 3, 1) == 1
    assert books.witness(seen(), 2) == 0


def test_books_and_witness_that_agree_show_no_drift(books):
    books.enter([delivery("r", [(0, 0, 4), (0, 4, 10), (1, 0, 3)])], 1)
    books.witness(seen("r", [(0, 0, 7), (0, 5, 12), (1, 0, 3)]), 1)
    report = reconcile(books, settled_before=LATER)
    assert report.drifts == []
    assert (report.charged_tokens, report.witnessed_tokens, report.undelivered_tokens) == (13, 15, 2)


@pytest.mark.parametrize(
    ("charged", "witnessed", "kind"),
    [
        (delivery(), seen("r", [(0, 0, 9)]), "unwitnessed"),
        (delivery("r", [(0, 0, 3), (0, 5, 10)]), seen(), "skipped"),
        (None, seen(), "uncharged"),
        (delivery(), seen(prompt_tokens=8), "prompt_tokens"),
        (delivery(), seen(account="other"), "account"),
    ],
)
def test_each_kind_of_drift_is_found(books, charged, witnessed, kind):
    books.enter([charged] if charged else [], 1)
    books.witness(witnessed, 1)
    assert kinds(books) == {kind}
    assert reconcile(books, settled_before=1).drifts == []


def test_what_was_generated_for_a_waived_request_is_no_drift_but_never_of_another_one(books):
    books.waive([Waiver("r", "acme")] * 2, 1)
    books.waive([Waiver("r", "acme")], 2)
    books.witness([*seen(), *seen("lost", [(0, 0, 4)])], 3)
    report = reconcile(books, settled_before=LATER)
    assert [(d.kind, d.about) for d in report.drifts] == [("uncharged", "lost")]
    assert report.undelivered_tokens == 14


@pytest.mark.parametrize(
    ("waiver", "charged", "kind"),
    [(Waiver("r", "acme"), delivery(), "waived"), (Waiver("r", "other"), None, "account")],
)
def test_a_waiver_that_contradicts_is_found(books, waiver, charged, kind):
    books.waive([waiver], 1)
    books.enter([charged] if charged else [], 1)
    books.witness(seen(), 1)
    assert kinds(books) == {kind}


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("UPDATE balances SET micros = micros + 1 WHERE account = 'acme'", "balance"),
        ("UPDATE entries SET micros = micros + 1 WHERE account = 'acme'", "double entry"),
        ("UPDATE requests SET completion_tokens = 9", "price"),
        ("INSERT INTO spans VALUES ('r', 0, 5, 8)", "overlap"),
    ],
)
def test_tampering_is_found(books, statement, kind):
    books.enter([delivery()], 1)
    books.witness(seen(), 1)
    assert kinds(books) == set()
    with books._engine.begin() as connection:
        connection.execute(sa.text(statement))
    assert kind in kinds(books)


def test_random_kills_between_transactions_leave_whole_postings(tmp_path):
    rng = random.Random(7)
    path = tmp_path / "b.sqlite"
    due = 0
    for round_ in range(5):
        books = Books(path)
        books.publish([PRICE], 0)
        batch = [delivery(f"{round_}-{i}", [(0, 0, rng.randint(1, 50))]) for i in range(20)]
        due += sum(books.enter(batch, 1))
        connection = books._engine.connect()
        connection.begin()
        connection.execute(
            sa.text("UPDATE balances SET micros = 0")
        )  # never committed: the process died here
        connection.invalidate()
        books.close()
    books = Books(path)
    assert owed(books) == due
    assert disagreements(books) == set()
    books.close()


def test_a_full_disk_is_an_error_and_leaves_whole_books(tmp_path):
    books = Books(tmp_path / "b.sqlite")
    books.publish([PRICE], 0)
    books.enter([delivery("before")], 1)
    with books._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sa.exc.OperationalError, match="full"):
        books.enter([delivery(f"r{i}") for i in range(2000)], 2)
    books.close()
    again = Books(tmp_path / "b.sqlite")
    assert owed(again) == 7
    assert disagreements(again) == set()
    assert again.enter([delivery("after")], 3) == [7]
    again.close()
