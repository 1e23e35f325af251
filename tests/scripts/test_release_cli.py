"""The commands on catalogs and releases, as a person uses them, and what they say of a wrong word."""

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest

from scripts import capacity, catalog_cli, release_cli
from scripts.failure import UsageFault
from store.decision import SCHEMA, Logistic, write

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "questions.jsonl"


@pytest.fixture
def antiphon(tmp_path, capsys):
    """Run a command with `--state`; return its exit code and what it printed."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for module in (catalog_cli, release_cli, capacity):
        module.add_parser(subparsers)

    def run(line, *more):
        words = [*line.split(), *map(str, more)]
        state = [] if words[0] == "capacity" else ["--state", str(tmp_path / "var")]
        args = parser.parse_args([*words, *state])
        code = args.handler(args)
        return code, capsys.readouterr().out

    return run


def rows(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    common = {"approved_by": "Ada", "answered_on": "2026-03-01"}
    path.write_text("".join(json.dumps({"question": q, "answer": a} | common) + "\n" for q, a in lines))
    return path


def test_from_rows_to_an_answer_and_back(antiphon, tmp_path):
    antiphon("release build --version v1 --rows", rows(tmp_path, ("Is it so?", "Yes.")))
    antiphon("release publish v1")
    antiphon("release activate v1")
    antiphon("release build --version v2 --rows", rows(tmp_path, ("Is it so?", "No."), ("And now?", "Now.")))
    antiphon("release publish v2")
    assert antiphon("catalog get is_it")[0] == 1
    assert antiphon("catalog get", "IS it so") == (0, f"[{entry_name('is it so')}]\nYes.\n")
    antiphon("release activate v2")
    assert antiphon("catalog get", "is it so?")[1].endswith("No.\n")
    assert antiphon("release diff v1 v2")[1].splitlines() == [
        "+ and now",
        "~ is it so",
        "1 added, 0 removed, 1 with another answer, 0 with other features",
    ]
    assert antiphon("release rollback")[0] == 0
    listed = json.loads(antiphon("release list --json")[1])
    assert (listed["active"], [row["version"] for row in listed["releases"]]) == ("v1", ["v1", "v2"])
    assert antiphon("release list")[1].splitlines()[0].startswith("* v1")


def entry_name(key):
    import hashlib

    return hashlib.sha256(key.encode()).hexdigest()[:12]


def test_the_release_before_is_the_parent(antiphon, tmp_path):
    for version in ("v1", "v2"):
        _, out = antiphon(f"release build --json --version {version} --rows", rows(tmp_path, ("a", version)))
        antiphon(f"release publish {version}")
        antiphon(f"release activate {version}")
    assert json.loads(out)["parents"] == ["v1"]


def test_a_model_and_a_threshold_of_ones_own(antiphon, tmp_path):
    write(Logistic(SCHEMA, "m7", ("historical_uplift",), (2.0,), 0.1), tmp_path / "model.json")
    source = rows(tmp_path, ("a", "b"))
    _, out = antiphon(
        "release build --json --threshold 0.7 --threshold-version t8 --rows",
        source,
        "--model",
        tmp_path / "model.json",
    )
    assert (json.loads(out)["model"], json.loads(out)["threshold"]) == ("m7", "t8")


def test_the_example_catalog_is_whole_and_answers(antiphon):
    code, out = antiphon("catalog build --json", EXAMPLES)
    report = json.loads(out)
    assert (code, report["problems"]) == (0, [])
    assert report["entries"] >= 50
    antiphon("release build --version example --rows", EXAMPLES)
    antiphon("release publish example")
    antiphon("release activate example")
    assert antiphon("catalog get", "What is ANTIPHON?")[1].startswith("[what-is-antiphon]")
    assert json.loads(antiphon("catalog stats --json")[1])["entries"] == report["entries"]


def test_rows_that_cannot_go_in_are_shown(antiphon, tmp_path):
    source = rows(tmp_path, ("a", "b"), ("A?", "c"))
    code, out = antiphon("catalog build", source)
    assert (code, out.splitlines()[0]) == (1, "row 2: conflict: A?")
    assert antiphon("catalog build --keep-going", source)[0] == 0
    with pytest.raises(UsageFault, match="1 of 2 rows"):
        antiphon("release build --version v1 --rows", source)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("release activate v9", "no release"),
        ("release activate ../v9", "letters, digits"),
        ("release publish v9", "neither published nor built"),
        ("release rollback", "nothing to go back to"),
        ("release build --threshold 0.5 --catalog x", "go together"),
        ("release build --catalog missing.mdb", "missing.mdb: No such file"),
        ("release build --catalog missing.mdb --model missing.json", "no decision model"),
        ("catalog build missing.jsonl", "no such file"),
        ("catalog get a", "no release is active"),
        ("catalog stats --release v9", "cannot be opened"),
        ("capacity --headroom 0.5", "headroom"),
        ("capacity --peak-factor inf", "peak_factor"),
        ("capacity --peak-factor nan", "peak_factor"),
    ],
)
def test_a_wrong_word_is_one_line_that_says_what_to_do(antiphon, line, says):
    with pytest.raises(UsageFault, match=says) as fault:
        antiphon(line)
    assert "\n" not in str(fault.value)


def test_decisions_of_days_that_are_over_are_sealed(antiphon, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
    from store.feedback import RatingRow, RowLog

    RowLog(tmp_path / "var" / "feedback", "ratings", "edge.0-1").write([RatingRow(1e9, "r", "acme", "up")])
    assert antiphon("catalog seal")[1] == "ratings of 2001-09-09: 1 rows\n1 days sealed\n"
    assert antiphon("catalog seal")[1] == "0 days sealed\n"


def test_a_release_goes_to_another_host_through_object_storage(antiphon, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: the [objects] extra")
    (tmp_path / "bucket").mkdir()
    antiphon("release build --version v1 --rows", rows(tmp_path, ("a", "b")))
    antiphon("release publish v1 --to", f"file://{tmp_path}/bucket")
    assert "v1" not in antiphon("release list")[1]
    antiphon("release fetch v1 --from", f"file://{tmp_path}/bucket")
    assert antiphon("release activate v1")[0] == 0


def test_capacity_applies_the_formulas():
    found = capacity.capacity(capacity.Load())
    assert found.first_turns_average == pytest.approx(2.5e9 / 86400 / 3)
    assert found.first_turns_peak == pytest.approx(28935, abs=1)
    assert (found.replicas, found.reviews_per_day, found.catalog_entries) == (2, 7200, 216_000)


def test_capacity_states_its_assumptions(antiphon):
    facts = json.loads(antiphon("capacity --json --lookups-per-second 10000 --headroom 1")[1])
    assert facts["capacity"]["replicas"] == 3
    assert facts["assumptions"]["headroom"] == 1.0


def test_the_list_says_what_is_wrong_with_a_release_and_with_the_pointer(antiphon, tmp_path):
    releases = tmp_path / "var" / "releases"
    for version in ("v1", "v2"):
        antiphon(f"release build --version {version} --rows", rows(tmp_path, ("a", version)))
        antiphon(f"release publish {version}")
    antiphon("release activate v1")
    assert antiphon("release list --verify")[0] == 0
    os.truncate(releases / "v1" / "catalog.mdb", 4096)
    code, out = antiphon("release list")
    assert (code, "truncated or changed" in out.splitlines()[0]) == (0, True)
    assert antiphon("release list --verify")[0] == 1
    (releases / "active.json").write_bytes(b"{")
    *_, last = antiphon("release list")[1].splitlines()
    assert "activate a release again" in last
    listed = json.loads(antiphon("release list --json")[1])
    assert (listed["active"], "activate a release again" in listed["fault"]) == (None, True)
    assert antiphon("release build --version v3 --rows", rows(tmp_path, ("a", "b")))[0] == 0


def test_an_active_release_that_is_not_there_is_named(antiphon, tmp_path):
    antiphon("release build --version v1 --rows", rows(tmp_path, ("a", "b")))
    antiphon("release publish v1")
    antiphon("release activate v1")
    shutil.rmtree(tmp_path / "var" / "releases" / "v1")
    assert "v1 is active, and not there" in antiphon("release list")[1]


def test_days_that_cannot_be_sealed_are_one_line_and_the_others_are_sealed(antiphon, tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
    from store.feedback import RatingRow, RowLog

    feedback = tmp_path / "var" / "feedback"
    RowLog(feedback, "ratings", "edge.0-1").write([RatingRow(1e9, "r", "acme", "up")])
    (feedback / "ratings" / "2001-09-09" / "edge.0-2.jsonl").write_bytes(b"no row\n")
    (feedback / "decisions" / "2001-09-09").mkdir(parents=True)
    (feedback / "decisions" / "2001-09-09.manifest.json").write_bytes(b"{")
    with pytest.raises(UsageFault, match=r"2001-09-09\.manifest\.json cannot be read") as fault:
        antiphon("catalog seal")
    assert "\n" not in str(fault.value)
    assert (
        capsys.readouterr().out == "ratings of 2001-09-09: 1 rows, 1 damaged lines left out\n1 days sealed\n"
    )
