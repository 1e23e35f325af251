import os
import socket
import stat

import pytest

from supervision.state_dir import StateInUse, StateUnusable, claim


def test_epochs_rise_over_supervisors(tmp_path):
    with claim(tmp_path) as epochs:
        first = [epochs.next() for _ in range(3)]
    with claim(tmp_path) as epochs:
        second = [epochs.next() for _ in range(3)]
    assert first + second == [1, 2, 3, 4, 5, 6]


def test_a_second_supervisor_is_refused_and_harms_nothing(tmp_path):
    with claim(tmp_path) as epochs:
        epochs.next()
        with pytest.raises(StateInUse, match=str(tmp_path)), claim(tmp_path):
            pass
        assert epochs.next() == 2


def test_the_run_directory_is_private(tmp_path):
    os.umask(os.umask(0))
    with claim(tmp_path):
        for made in ("run", "logs"):
            assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700


def test_stale_sockets_are_removed_at_both_ends(tmp_path):
    (tmp_path / "run").mkdir()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / "run" / "a.ipc"))
        with claim(tmp_path):
            assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch"]
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(tmp_path / "run" / "b.ipc"))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateUnusable, match=r"file.*choose a state directory"), claim(tmp_path / "file"):
        pass


def test_an_epoch_that_is_no_number_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "epoch").write_text("garbage")
    with pytest.raises(StateUnusable, match="run/epoch holds no number"), claim(tmp_path):
        pass
