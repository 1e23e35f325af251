from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from store.witness_outbox import Count, OutboxError, WitnessOutbox

COUNT = Count("turn/0@batcher.0.1", "turn", 0, "acme", "small", 7, 0, 3)


def test_a_count_survives_its_writer_with_its_newest_end(tmp_path: Path) -> None:
    outbox = WitnessOutbox(tmp_path / "a" / "o.sqlite")
    outbox.write([COUNT, evolve(COUNT, key="other")])
    outbox.write([evolve(COUNT, end=9)])
    outbox.close()
    assert WitnessOutbox(tmp_path / "a" / "o.sqlite").pending() == [
        evolve(COUNT, key="other"),
        evolve(COUNT, end=9),
    ]


def test_a_confirmed_count_is_forgotten_unless_it_has_grown(tmp_path: Path) -> None:
    outbox = WitnessOutbox(tmp_path / "o.sqlite")
    outbox.write([COUNT, evolve(COUNT, key="grown")])
    outbox.write([evolve(COUNT, key="grown", end=5)])
    outbox.confirm([COUNT, evolve(COUNT, key="grown")])
    assert outbox.pending() == [evolve(COUNT, key="grown", end=5)]


def test_a_file_that_is_no_outbox_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "o.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(OutboxError, match=r"o\.sqlite"):
        WitnessOutbox(tmp_path / "o.sqlite")
