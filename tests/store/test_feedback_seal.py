"""A sealed day has every row once, and is what its manifest says."""

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
from pyarrow import parquet

from store.decision import INPUTS
from store.feedback import DecisionRow, RatingRow, RowLog, day_of
from store.feedback_seal import SETTLING, SealError, seal, seal_closed_days, verify_day

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
