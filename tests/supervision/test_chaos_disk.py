"""A pretended slow disk slows whatever commits or flushes, through whichever library, and nothing else."""

import os
import sqlite3

import pytest
import sqlalchemy as sa

from store import wal
from store.sqlite import open_engine, reader
from supervision import chaos_disk


@pytest.fixture
def switch(tmp_path, monkeypatch):
    """The switch, on, with waits of no time; afterwards the process is as before."""
    monkeypatch.setattr(chaos_disk, "FASTEST", 0.0)
    monkeypatch.setattr(chaos_disk, "SLOWEST", 0.0)
    monkeypatch.setattr(chaos_disk, "_switch", None)
    monkeypatch.setattr(os, "fsync", os.fsync)
    monkeypatch.setattr(sqlite3, "connect", sqlite3.connect)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", sqlite3.dbapi2.connect)
    chaos_disk.install(tmp_path)
    path = chaos_disk.switch_of(tmp_path)
    path.parent.mkdir()
    path.touch()
    return path


def waits(switch) -> int:
    """How many waits there were since the last look."""
    count = len(switch.read_text().splitlines())
    switch.write_text("")
    return count


def test_a_connection_waits_for_what_it_commits_and_for_checkpoints_only(tmp_path, switch):
    db = wal.connect(tmp_path / "a.sqlite")
    db.execute("CREATE TABLE t (x)")
    assert waits(switch) == 0
    db.execute("INSERT INTO t VALUES (1)")
    assert waits(switch) == 1
    db.execute("BEGIN")
    db.executemany("INSERT INTO t VALUES (?)", [(2,), (3,)])
    assert waits(switch) == 0
    db.execute("COMMIT")
    assert waits(switch) == 1
    assert db.execute("SELECT count(*) FROM t").fetchone() == (3,)
    assert waits(switch) == 0
    wal.checkpoint(tmp_path / "a.sqlite")
    assert waits(switch) == 1
    db.close()


def test_sqlalchemys_transactions_wait_when_they_wrote_and_were_not_rolled_back(tmp_path, switch):
    engine = open_engine(tmp_path / "b.sqlite", synchronous="FULL")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (x)"))
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    assert waits(switch) == 1
    with reader(engine).connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM t")).scalar_one() == 1
    with engine.connect() as connection:
        connection.execute(sa.text("INSERT INTO t VALUES (2)"))
        connection.rollback()
    with engine.begin() as connection:
        connection.execute(sa.text("SELECT 1"))
    assert waits(switch) == 0
    engine.dispose()


def test_a_flush_waits_until_the_switch_is_gone(tmp_path, switch):
    with (tmp_path / "c").open("wb") as file:
        os.fsync(file.fileno())
        assert waits(switch) == 1
        switch.unlink()
        os.fsync(file.fileno())
    assert not switch.exists()
