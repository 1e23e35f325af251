"""A new installation answers questions about itself; an operator's own releases are left alone."""

import pytest

from scripts.failure import UsageFault
from scripts.first_release import VERSION, activate_example
from store.normalise import key_of
from store.release import POINTER, open_release, read_pointer
from store.release_publish import rollback


def test_a_new_installation_has_the_example(tmp_path):
    activate_example(tmp_path)
    release = open_release(tmp_path / "releases", read_pointer(tmp_path / "releases").active)
    assert release.catalog.find(key_of("What is Antiphon?")).name == "what-is-antiphon"
    release.close()


def test_a_second_start_changes_nothing(tmp_path):
    activate_example(tmp_path)
    before = read_pointer(tmp_path / "releases")
    activate_example(tmp_path)
    assert read_pointer(tmp_path / "releases") == before
    with pytest.raises(Exception, match="nothing to go back to"):
        rollback(tmp_path / "releases")


def test_what_was_stopped_half_way_is_finished(tmp_path):
    activate_example(tmp_path)
    (tmp_path / "releases" / POINTER).unlink()
    activate_example(tmp_path)
    assert read_pointer(tmp_path / "releases").active.version == VERSION


def test_an_operators_own_releases_are_left_alone(tmp_path):
    (tmp_path / "releases" / "mine").mkdir(parents=True)
    activate_example(tmp_path)
    assert read_pointer(tmp_path / "releases") is None


def test_a_pointer_that_cannot_be_read_is_one_clear_line(tmp_path):
    activate_example(tmp_path)
    (tmp_path / "releases" / POINTER).write_bytes(b"{")
    with pytest.raises(UsageFault, match="activate a release again"):
        activate_example(tmp_path)
