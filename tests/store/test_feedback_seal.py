"""A sealed day has every row once, and is what its manifest says."""

import json

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
from pyarrow import parquet

from store.decision import INPUTS
from store.feedback import SETTLING, DecisionRow, RatingRow, RowLog, day_of
from store.feedback_seal import SealError, seal, seal_closed_days, verify_day

NOON = 1_764_504_000.0
MIDNIGHT = NOON + 43200
DAY = day_of(NOON)


class KilledError(Exception):
    pass


def kill_at(step):
    def checkpoint(passed):
        if passed == step:
            raise KilledError

    return checkpoint


@pytest.fixture
def root(tmp_path):
    for number in range(3):
        writer = RowLog(tmp_path, "decisions", f"fast_answer.{number}-1")
        inputs = tuple(float(i) for i in range(len(INPUTS)))
        writer.write(
            [
                DecisionRow(
                    NOON + i, f"{number}/{i}", "acme", "v1", "e", inputs, 0.7, 0.5, "policy", "serve", "", 1.0
                )
                for i in range(4)
            ]
        )
    return tmp_path


def sealed_requests(root):
    table = parquet.read_table(root / "decisions" / f"{DAY}.parquet")
    return sorted(table.column("request_id").to_pylist())


ALL = sorted(f"{number}/{i}" for number in range(3) for i in range(4))


def test_a_day_that_is_over_is_sealed_with_all_its_rows(root):
    (manifest,) = seal_closed_days(root, "decisions", MIDNIGHT + SETTLING)
    assert (manifest.rows, manifest.inputs, manifest.day) == (12, INPUTS, DAY)
    assert sealed_requests(root) == ALL
    assert not (root / "decisions" / DAY).exists()


def test_a_day_stays_open_until_its_last_rows_are_surely_written(root):
    assert seal_closed_days(root, "decisions", MIDNIGHT + SETTLING - 1) == []


@pytest.mark.parametrize("step", ["wrote rows", f"wrote {DAY}.manifest.json", f"renamed {DAY}.manifest.json"])
def test_sealing_again_after_a_kill_ends_with_every_row_once(root, step):
    with pytest.raises(KilledError):
        seal(root, "decisions", DAY, kill_at(step))
    seal(root, "decisions", DAY)
    assert sealed_requests(root) == ALL


def test_sealing_what_is_sealed_changes_nothing(root):
    assert seal(root, "decisions", DAY) == seal(root, "decisions", DAY)


def test_a_file_that_was_changed_is_noticed_and_its_rows_kept(root):
    seal(root, "decisions", DAY)
    path = root / "decisions" / f"{DAY}.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SealError, match="manifest"):
        verify_day(root, "decisions", DAY)


def test_ratings_are_sealed_too(tmp_path):
    RowLog(tmp_path, "ratings", "edge.0-1").write([RatingRow(NOON, "r", "acme", "up")])
    assert seal(tmp_path, "ratings", DAY).rows == 1


def test_lines_that_are_no_rows_are_counted_and_their_files_kept(root):
    (path, *_) = sorted((root / "decisions" / DAY).iterdir())
    path.write_bytes(b'{"at":1.0,"requ\n' + path.read_bytes())
    content = path.read_bytes()
    manifest = seal(root, "decisions", DAY)
    assert (manifest.rows, manifest.damaged_lines) == (12, 1)
    assert sealed_requests(root) == ALL
    assert (root / "decisions" / "damaged" / DAY / path.name).read_bytes() == content
    assert seal(root, "decisions", DAY) == manifest
    assert seal_closed_days(root, "decisions", MIDNIGHT + SETTLING) == []


def test_a_day_that_cannot_be_sealed_is_one_line_and_keeps_no_other_waiting(root, monkeypatch):
    before = "2025-11-29"
    (root / "decisions" / before).mkdir()
    (root / "decisions" / f"{before}.manifest.json").write_bytes(b"{")
    fault, manifest = seal_closed_days(root, "decisions", MIDNIGHT + SETTLING)
    assert isinstance(fault, SealError)
    assert f"{before}.manifest.json cannot be read" in str(fault)
    assert "\n" not in str(fault)
    assert manifest.rows == 12


def test_on_a_full_disk_the_rows_stay_where_they_were(root, monkeypatch):
    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("store.feedback_seal.flush", full)
    with pytest.raises(
        SealError, match=f"decisions of {DAY} in .* cannot be sealed: No space left on device"
    ):
        seal(root, "decisions", DAY)
    assert [path.name for path in (root / "decisions").iterdir() if path.name != ".lock"] == [DAY]
    monkeypatch.undo()
    assert seal(root, "decisions", DAY).rows == 12


def test_what_a_killed_sealer_left_is_swept(root):
    (root / "decisions" / ".incoming-x").write_bytes(b"half")
    seal(root, "decisions", DAY)
    assert not (root / "decisions" / ".incoming-x").exists()


def test_a_manifest_from_before_damaged_lines_were_counted_is_read(root):
    seal(root, "decisions", DAY)
    assert "damaged_lines" not in json.loads((root / "decisions" / f"{DAY}.manifest.json").read_bytes())
    assert verify_day(root, "decisions", DAY).damaged_lines == 0
