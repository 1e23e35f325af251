"""A new installation answers questions about itself; an operator's own releases are left alone."""

import json

import pytest

from scripts import doctor
from scripts.config import Config
from scripts.first_release import VERSION, activate_example
from store.decision import ALWAYS, EVEN
from store.normalise import key_of
from store.release import CATALOG, MANIFEST, POINTER, open_release, read_pointer
from store.release_publish import activate, build, publish, rollback


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


@pytest.fixture
def earlier(monkeypatch):
    """Do something as a program did whose catalogs have schema 1."""

    def run(doing, *args, **options):
        with monkeypatch.context() as patched:
            patched.setattr("store.catalog.SCHEMA", 1)
            patched.setattr("store.catalog_build.SCHEMA", 1)
            return doing(*args, **options)

    return run


def answers(state):
    """Open what serves, as a replica does; return its version."""
    release = open_release(state / "releases", read_pointer(state / "releases").active)
    assert release.catalog.find(key_of("What is Antiphon?")).name == "what-is-antiphon"
    release.close()
    return release.version


def of_ones_own(state, version, **facts):
    """Publish and activate a release that is the example's catalog under a name of one's own."""
    activate_example(state)
    root = state / "releases"
    build(state / version, version, root / VERSION / CATALOG, ALWAYS, EVEN, **facts)
    publish(root, state / version)
    activate(root, version)


def looked_at(state):
    finding = doctor._fast_answers(Config(state=str(state)))
    return finding.state, finding.found, finding.mend


def test_nothing_wrong_is_nothing_said(tmp_path):
    assert looked_at(tmp_path)[0] == "note"
    assert (activate_example(tmp_path), activate_example(tmp_path)) == ("", "")
    assert looked_at(tmp_path)[0] == "ok"


def test_a_pointer_that_cannot_be_read_is_one_clear_line_and_stops_nothing(tmp_path):
    activate_example(tmp_path)
    pointer = tmp_path / "releases" / POINTER
    pointer.write_bytes(b'{"act')
    said = activate_example(tmp_path)
    assert said.startswith(f"fast answers are off: {pointer} cannot be read: ")
    assert "activate a release again" in said
    assert "\n" not in said
    assert pointer.read_bytes() == b'{"act'
    state, found, mend = looked_at(tmp_path)
    assert (state, str(pointer) in found, "activate" in mend) == ("wrong", True, True)


def test_an_example_of_an_earlier_format_gives_way_to_one_that_can_be_served(tmp_path, earlier):
    earlier(activate_example, tmp_path)
    state, found, mend = looked_at(tmp_path)
    assert (state, "has schema 1" in found, "antiphon serve" in mend) == ("wrong", True, True)
    said = activate_example(tmp_path)
    assert ("has schema 1" in said, "antiphon-2 takes its place" in said) == (True, True)
    assert answers(tmp_path) == "antiphon-2"
    assert activate_example(tmp_path) == ""
    assert looked_at(tmp_path)[0] == "ok"


def test_a_taken_version_is_no_obstacle_to_the_next_example(tmp_path, earlier):
    earlier(of_ones_own, tmp_path, "antiphon-2", parents=(VERSION,))
    earlier(activate, tmp_path / "releases", VERSION)
    activate_example(tmp_path)
    assert answers(tmp_path) == "antiphon-3"


def test_an_example_that_was_built_again_and_not_activated_is_activated(tmp_path, earlier):
    earlier(activate_example, tmp_path)
    old = (tmp_path / "releases" / POINTER).read_bytes()
    activate_example(tmp_path)
    (tmp_path / "releases" / POINTER).write_bytes(old)
    activate_example(tmp_path)
    assert answers(tmp_path) == "antiphon-2"
    assert not (tmp_path / "releases" / "antiphon-3").exists()


def test_a_damaged_example_gives_way_too(tmp_path):
    activate_example(tmp_path)
    (tmp_path / "releases" / VERSION / CATALOG).unlink()
    assert "catalog.mdb is missing" in activate_example(tmp_path)
    assert answers(tmp_path) == "antiphon-2"


@pytest.mark.parametrize("facts", [{"version": "mine"}, {"version": "antiphon-2", "parents": (VERSION,)}])
def test_an_operators_release_of_an_earlier_format_is_reported_and_left_alone(tmp_path, earlier, facts):
    earlier(of_ones_own, tmp_path, **facts)
    before = read_pointer(tmp_path / "releases")
    said = activate_example(tmp_path)
    assert said.startswith(
        f"fast answers are off: {tmp_path}/releases/{facts['version']}/{CATALOG} has schema 1"
    )
    assert "\n" not in said
    assert read_pointer(tmp_path / "releases") == before


def test_a_release_that_is_not_what_was_activated_is_reported(tmp_path):
    of_ones_own(tmp_path, "mine")
    manifest = tmp_path / "releases" / "mine" / MANIFEST
    manifest.write_bytes(json.dumps(json.loads(manifest.read_bytes()) | {"source": "other"}).encode())
    assert "its manifest has changed" in activate_example(tmp_path)


def test_a_full_disk_keeps_nobody_from_serving(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scripts.first_release.publish", full)
    assert "No space left on device" in activate_example(tmp_path)
