"""Rows are read back as they were written, by day, whoever was killed while writing."""

import os
import subprocess
import sys
from pathlib import Path

from store.feedback import DecisionRow, RatingRow, RowLog, day_of, open_days, read_day

NOON = 1_764_504_000.0  # 2025-11-30 12:00 UTC
DAY, NEXT = "2025-11-30", "2025-12-01"


def decision(i, at=NOON):
    return DecisionRow(at, f"r{i}", "acme", "v1", "e", (0.5, float(i)), 0.7, 0.5, "policy", "serve", "", 0.95)


def log(root, rows, writer="fast_answer.0-1", kind="decisions"):
    writer = RowLog(root, kind, writer)
    writer.add(rows)
    writer.write(writer.take())


def test_days_are_utc_days():
    assert [day_of(NOON), day_of(NOON + 43199.9), day_of(NOON + 43200)] == [DAY, DAY, NEXT]


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [decision(i) for i in range(3)]
    log(tmp_path, rows[:2])
    log(tmp_path, rows[2:], "fast_answer.1-1")
    assert list(read_day(tmp_path, "decisions", DAY)) == rows


def test_a_row_goes_to_the_file_of_its_own_day(tmp_path):
    log(tmp_path, [decision(0), decision(1, NOON + 43200)])
    assert [row.request_id for row in read_day(tmp_path, "decisions", NEXT)] == ["r1"]


def test_rows_taken_are_not_taken_again(tmp_path):
    writer = RowLog(tmp_path, "ratings", "edge.0-1")
    writer.add([RatingRow(NOON, "r1", "acme", "down")])
    writer.write(writer.take(), flushed=True)
    assert writer.take() == []
    assert list(read_day(tmp_path, "ratings", DAY)) == [RatingRow(NOON, "r1", "acme", "down")]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    log(tmp_path, [decision(0), decision(1)])
    (path,) = (tmp_path / "decisions" / DAY).iterdir()
    os.truncate(path, path.stat().st_size - 5)
    assert [row.request_id for row in read_day(tmp_path, "decisions", DAY)] == ["r0"]


def test_today_is_not_over(tmp_path):
    log(tmp_path, [decision(0), decision(1, NOON + 43200)])
    assert open_days(tmp_path, "decisions", NEXT) == [DAY]
    assert open_days(tmp_path, "ratings", NEXT) == []


def test_a_line_that_is_no_row_is_left_out_and_reported(tmp_path):
    log(tmp_path, [decision(0)])
    (path,) = (tmp_path / "decisions" / DAY).iterdir()
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"requ\n\xff\n{"at": "noon"}\n')
    log(tmp_path, [decision(1)])
    damaged = []
    rows = [row.request_id for row in read_day(tmp_path, "decisions", DAY, damaged.append)]
    assert (rows, damaged) == (["r0", "r1"], [path] * 3)


def test_what_is_left_of_a_line_does_not_spoil_the_next(tmp_path):
    log(tmp_path, [decision(0), decision(1)])
    (path,) = (tmp_path / "decisions" / DAY).iterdir()
    os.truncate(path, path.stat().st_size - 5)
    log(tmp_path, [decision(2)])
    assert [row.request_id for row in read_day(tmp_path, "decisions", DAY)] == ["r0", "r2"]


SMALL_DISK = """
import resource, sys
from pathlib import Path
from store.feedback import RatingRow, RowLog
writer = RowLog(Path(sys.argv[1]), "ratings", "edge.0-1")
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
def write(name, rows=1):
    try:
        writer.write([RatingRow(float(sys.argv[2]), name, "acme", "up")] * rows, flushed=True)
    except OSError:
        return False
    print(name)
    return True
resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
assert not write("too many", 2000)
kept = 0
while write(f"r{kept}"):
    kept += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert write("after")
"""


def test_on_a_full_disk_exactly_the_rows_that_were_confirmed_are_kept(tmp_path):
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path), str(NOON)]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=path, timeout=60, check=True, capture_output=True, text=True)
    confirmed = done.stdout.split()
    damaged = []
    rows = [row.request_id for row in read_day(tmp_path, "ratings", DAY, damaged.append)]
    assert (rows, damaged) == (confirmed, [])
    assert len(confirmed) > 2
