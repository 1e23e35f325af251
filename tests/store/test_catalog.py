"""The catalog: what is built from approved rows is found again, and what cannot be served is refused."""

import datetime as dt
import json

import lmdb
import pytest

from store.answer import pack_answer
from store.catalog import FEATURES, SCHEMA, Catalog, CatalogError, Entry
from store.catalog_build import BuildRefused, CatalogBuilder, CatalogRow, open_source
from store.normalise import NORMALISER, key_of

LONG = "A sentence that says the same as every other. " * 60


def row(question, answer="Yes.", **fields):
    return {
        "question": question,
        "answer": answer,
        "approved_by": "Ada",
        "answered_on": "2026-03-01",
        **fields,
    }


def built(tmp_path, rows, name="catalog.mdb", **options):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
    target = tmp_path / name
    return CatalogBuilder(open_source(source)).build(target, **options), target


def found(path, question):
    catalog = Catalog(path)
    try:
        return catalog.find(key_of(question))
    finally:
        catalog.close()


def test_a_question_is_found_in_any_spelling(tmp_path):
    _, path = built(
        tmp_path, [row("What is C++?", "A language.", id="cpp"), row("What is C#?", "Another.", id="cs")]
    )
    assert found(path, " what IS c++ ").name == "cpp"
    assert found(path, "what is C#").answer == "Another."
    assert found(path, "what is C") is None


def test_features_come_back_as_they_were_measured(tmp_path):
    fields = {"uplift": 0.1, "frequency": 1234567, "feedback": 7}
    _, path = built(tmp_path, [row("a", id="a", **fields)])
    days = float((dt.date(2026, 3, 1) - dt.date(1970, 1, 1)).days)
    assert found(path, "a") == Entry("a", (0.1, 1234567.0, days, 7.0), pack_answer("Yes.", 100))


@pytest.mark.parametrize("size", [1, 2000, 2100, 9000])
def test_answers_of_any_length_come_back_whole(tmp_path, size):
    answers = [(LONG * 5)[i : i + size] for i in range(5)]
    _, path = built(tmp_path, [row(f"question {i}", "." + answer) for i, answer in enumerate(answers)])
    assert [found(path, f"question {i}").answer for i in range(5)] == ["." + answer for answer in answers]


def test_answers_over_half_a_page_share_pages(tmp_path):
    report, _ = built(tmp_path, [row(f"question {i}", f"{i} {LONG}") for i in range(400)])
    assert report.size < 400 * 4096 / 3


def test_other_phrasings_lead_to_the_entry(tmp_path):
    report, path = built(
        tmp_path, [row("How do I start it?", "Run up.", id="start", also=["how to start", "HOW to start?"])]
    )
    assert (report.entries, report.keys, report.errors) == (1, 2, 0)
    assert found(path, "How to start?") == found(path, "how do i start it")


def test_a_repeated_row_is_reported_and_harmless(tmp_path):
    report, path = built(tmp_path, [row("a"), row("A?")])
    assert [(p.line, p.kind, p.text) for p in report.problems] == [(2, "duplicate", "A?")]
    assert (report.keys, report.errors) == (1, 0)
    assert found(path, "a").answer == "Yes."


REFUSED = [
    (row("A?", "No."), "conflict"),
    (row("?", "No.") | {"question": " "}, "no_key"),
    (row("b") | {"approved_by": " "}, "invalid"),
    (row("b", " "), "invalid"),
    (row("b", id="a/b"), "invalid"),
    (row("b", id="taken"), "invalid"),
    (row("b", frequency=-1), "invalid"),
    (row("b") | {"answered_on": "yesterday"}, "invalid"),
    (row("b") | {"colour": "red"}, "invalid"),
    ({"question": "b"}, "invalid"),
    ("not json\n", "invalid"),
]


@pytest.mark.parametrize(("bad", "kind"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_row_stops_the_build_and_is_named(tmp_path, bad, kind):
    with pytest.raises(BuildRefused) as refused:
        built(tmp_path, [row("a", id="taken"), bad])
    assert [(p.line, p.kind) for p in refused.value.report.problems] == [(2, kind)]
    assert not (tmp_path / "catalog.mdb").exists()


@pytest.mark.parametrize(("bad", "kind"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_row_can_be_left_out(tmp_path, bad, kind):
    report, path = built(tmp_path, [row("a", id="taken"), bad, row("c")], keep_going=True)
    assert (report.rows, report.entries, report.errors) == (3, 2, 1)
    assert found(path, "c") is not None


def test_no_rows_make_no_catalog(tmp_path):
    with pytest.raises(BuildRefused, match="at least one"):
        built(tmp_path, [])


def test_equal_rows_make_equal_files(tmp_path):
    rows = [row(f"question {i}", LONG[: 50 * i]) for i in range(1, 60)]
    assert built(tmp_path, rows, "one")[1].read_bytes() == built(tmp_path, rows, "two")[1].read_bytes()


def test_parquet_rows_are_the_same_rows(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
    from pyarrow import parquet

    rows = [row(f"question {i}", LONG[i:], frequency=i, also=[f"other {i}"]) for i in range(9)]
    columns = [r | {"answered_on": dt.date(2026, 3, 1)} for r in rows]
    parquet.write_table(pa.Table.from_pylist(columns), tmp_path / "rows.parquet")
    CatalogBuilder(open_source(tmp_path / "rows.parquet")).build(tmp_path / "from_parquet")
    _, from_json = built(tmp_path, rows)
    assert (tmp_path / "from_parquet").read_bytes() == from_json.read_bytes()


def test_a_number_that_is_none_is_no_feature(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
    from pyarrow import parquet

    bad = row("a", uplift=float("nan")) | {"answered_on": dt.date(2026, 3, 1)}
    parquet.write_table(pa.Table.from_pylist([bad]), tmp_path / "rows.parquet")
    with pytest.raises(BuildRefused):
        CatalogBuilder(open_source(tmp_path / "rows.parquet")).build(tmp_path / "catalog.mdb")


def test_progress_ends_at_the_end(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("a")) + "\n")
    seen = []
    CatalogBuilder(open_source(tmp_path / "rows.jsonl"), lambda done, of: seen.append((done, of))).build(
        tmp_path / "c"
    )
    assert seen[-1] == (1, 1)


def test_a_build_that_fails_leaves_no_file(tmp_path):
    class Unreadable:
        def __iter__(self):
            return iter([(0, CatalogRow("a", "b", "Ada", dt.date(2026, 3, 1)))])

        def read(self, where):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        CatalogBuilder(Unreadable()).build(tmp_path / "catalog.mdb")
    assert list(tmp_path.iterdir()) == []


def test_the_probe_is_in_it(tmp_path):
    _, path = built(tmp_path, [row("a"), row("b"), row("c")])
    catalog = Catalog(path)
    assert catalog.find(key_of(catalog.about.probe)) is not None
    catalog.close()


def rewritten(path, **changes):
    """The same catalog with another description."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, lib_version=0) as env,
        env.begin(write=True) as transaction,
    ):
        about = json.loads(transaction.get(b"\0about")) | changes
        transaction.put(b"\0about", json.dumps(about).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}"),
        ({"features": [*FEATURES, "mood"]}, "mood"),
        ({"normaliser": "0" * 64}, f"this program has {NORMALISER.digest[:12]}"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_catalog_of_another_kind_is_refused(tmp_path, changes, says):
    _, path = built(tmp_path, [row("a")])
    rewritten(path, **changes)
    with pytest.raises(CatalogError, match=says):
        Catalog(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"not a catalog" * 1000])
def test_a_file_that_is_no_catalog_is_refused(tmp_path, content):
    (tmp_path / "catalog.mdb").write_bytes(content)
    with pytest.raises(CatalogError):
        Catalog(tmp_path / "catalog.mdb")


def test_a_missing_file_is_refused_and_not_made(tmp_path):
    with pytest.raises(CatalogError):
        Catalog(tmp_path / "catalog.mdb")
    assert list(tmp_path.iterdir()) == []
