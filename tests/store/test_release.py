"""A release is served only if it is whole, and is whole or not there when its publisher is killed."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest

from store.catalog_build import CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN, Threshold
from store.normalise import key_of
from store.release import (
    CATALOG,
    MANIFEST,
    MODEL,
    POINTER,
    STAMPS,
    THRESHOLD,
    Manifest,
    OpenRelease,
    ReleaseError,
    Unhashed,
    check_published,
    open_release,
    read_manifest,
    read_pointer,
    verify,
)
from store.release_publish import activate, build, diff, publish, published, rollback


def catalog_of(directory, answers):
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory / "rows.jsonl"
    lines = [
        {"question": q, "answer": a, "approved_by": "Ada", "answered_on": "2026-03-01"}
        for q, a in answers.items()
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    CatalogBuilder(open_source(rows)).build(directory / "catalog.mdb")
    return directory / "catalog.mdb"


def built(base, version, answers=None, threshold=EVEN, **facts):
    answers = {"Which release is this?": version} if answers is None else answers
    build(
        base / "built" / version,
        version,
        catalog_of(base / f"rows-{version}", answers),
        ALWAYS,
        threshold,
        **facts,
    )
    return base / "built" / version


@pytest.fixture
def root(tmp_path):
    """Releases v1 and v2, published; v1 serves."""
    root = tmp_path / "releases"
    for version in ("v1", "v2"):
        publish(root, built(tmp_path, version))
    activate(root, "v1")
    return root


def served(root):
    """What a replica would answer now."""
    release = open_release(root, read_pointer(root).active)
    answer = release.catalog.find(key_of("which release is this")).answer
    release.close()
    assert answer == release.version
    return answer


def test_what_was_activated_serves(root):
    assert served(root) == "v1"
    activate(root, "v2")
    assert served(root) == "v2"


def test_rollback_goes_back_and_no_further_than_the_first(root):
    activate(root, "v2")
    assert rollback(root).active.version == "v1"
    assert served(root) == "v1"
    with pytest.raises(ReleaseError, match="nothing to go back to"):
        rollback(root)


def test_every_change_of_the_pointer_raises_its_sequence(root):
    sequences = [read_pointer(root).sequence, activate(root, "v2").sequence, rollback(root).sequence]
    assert sequences == [1, 2, 3]


def test_activating_what_serves_changes_nothing(root):
    before = read_pointer(root)
    assert activate(root, "v1") == before


def test_no_pointer_means_no_release(tmp_path):
    assert read_pointer(tmp_path) is None


def test_the_manifest_says_what_it_was_made_of(tmp_path):
    manifest = verify(
        built(tmp_path, "v3", parents=("v2",), source="abc", threshold=Threshold(1, "t8", 0.25))
    )
    assert (manifest.version, manifest.parents, manifest.source) == ("v3", ("v2",), "abc")
    assert (manifest.model, manifest.threshold, manifest.entries) == ("always", "t8", 1)
    assert set(manifest.files) == {CATALOG, MODEL, THRESHOLD}


def test_a_release_is_built_once(tmp_path):
    directory = built(tmp_path, "v3")
    with pytest.raises(ReleaseError, match="exists"):
        build(directory, "v3", directory / CATALOG, ALWAYS, EVEN)


@pytest.mark.parametrize("version", ["", "../v1", ".hidden", "a/b", "x" * 65, "v 1"])
def test_a_version_is_a_name(tmp_path, version):
    with pytest.raises(ReleaseError, match="release version"):
        build(tmp_path / "x", version, tmp_path / "none", ALWAYS, EVEN)
    with pytest.raises(ReleaseError, match="release version"):
        activate(tmp_path, version)


def test_publishing_again_is_harmless_and_other_content_is_refused(tmp_path, root):
    publish(root, tmp_path / "built" / "v1")
    other = built(tmp_path / "other", "v1", {"Which release is this?": "not v1"})
    with pytest.raises(ReleaseError, match="take a new version"):
        publish(root, other)
    assert served(root) == "v1"


def test_published_files_are_copies(tmp_path, root):
    (tmp_path / "built" / "v1" / CATALOG).write_bytes(b"")
    assert served(root) == "v1"


def edit(path, change):
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(json.dumps(content).encode())


DAMAGE = {
    "truncated catalog": (CATALOG, lambda p: os.truncate(p, p.stat().st_size // 2)),
    "longer catalog": (CATALOG, lambda p: p.write_bytes(p.read_bytes() + b"\0")),
    "one flipped bit": (
        CATALOG,
        lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    ),
    "missing model": (MODEL, Path.unlink),
    "other threshold": (THRESHOLD, lambda p: edit(p, lambda t: t.update(threshold=0.1))),
    "missing manifest": (MANIFEST, Path.unlink),
    "empty manifest": (MANIFEST, lambda p: p.write_bytes(b"")),
    "other schema": (MANIFEST, lambda p: edit(p, lambda m: m.update(schema=9))),
    "other normal form": (MANIFEST, lambda p: edit(p, lambda m: m.update(normaliser="0" * 64))),
    "unknown field": (MANIFEST, lambda p: edit(p, lambda m: m.update(colour="red"))),
    "a file outside": (
        MANIFEST,
        lambda p: edit(p, lambda m: m["files"].update({"../x": m["files"].pop(MODEL)})),
    ),
    "other version": (MANIFEST, lambda p: edit(p, lambda m: m.update(version="v9"))),
    "other counts": (MANIFEST, lambda p: edit(p, lambda m: m.update(keys=9))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_release_is_refused_and_the_old_one_serves(root, name):
    part, damage = DAMAGE[name]
    damage(root / "v2" / part)
    with pytest.raises(ReleaseError):
        activate(root, "v2")
    assert served(root) == "v1"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_release_damaged_after_it_was_activated_is_not_mapped(root, name):
    part, damage = DAMAGE[name]
    damage(root / "v1" / part)
    with pytest.raises(ReleaseError):
        open_release(root, read_pointer(root).active)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_release_is_not_published(tmp_path, root, name):
    directory = built(tmp_path, "v3")
    part, damage = DAMAGE[name]
    damage(directory / part)
    if name == "other version":
        publish(root, directory)  # nothing contradicts it: it is release v9
        assert [version for version, _ in published(root)] == ["v1", "v2", "v9"]
    else:
        with pytest.raises(ReleaseError):
            publish(root, directory)
        assert [version for version, _ in published(root)] == ["v1", "v2"]


def test_a_model_that_is_not_the_manifests_is_refused(tmp_path, root):
    directory = built(tmp_path, "v3")
    edit(directory / MANIFEST, lambda m: m.update(threshold="t9"))
    with pytest.raises(ReleaseError, match="threshold even"):
        verify(directory)


@contextmanager
def written(catalog):
    """A transaction on a catalog that nobody but a test would change."""
    options = {"subdir": False, "lock": False, "lib_version": 0}
    with lmdb.open(str(catalog), **options) as environment, environment.begin(write=True) as transaction:
        yield transaction


def test_a_catalog_that_lost_its_probe_is_not_served(tmp_path):
    directory = built(tmp_path, "v3")
    manifest, _ = read_manifest(directory)
    with written(directory / CATALOG) as transaction:
        transaction.delete(b"which release is this")
    with pytest.raises(ReleaseError, match="its own probe"):
        OpenRelease(directory, manifest)


NO_NAME = b"\1" + bytes(32) + b"\xff" * 9
NO_ANSWER = b"\1" + bytes(32) + b"a" + b"\1" + b"\xff" * 9
"""A head, a name, and what says it is deflated and is not."""


@pytest.mark.parametrize("value", [b"\0", b"\1", NO_NAME, NO_ANSWER])
def test_an_entry_that_cannot_be_unpacked_is_not_served(tmp_path, value):
    directory = built(tmp_path, "v3")
    manifest, _ = read_manifest(directory)
    with written(directory / CATALOG) as transaction:
        transaction.put(b"which release is this", value)
    with pytest.raises(ReleaseError, match="cannot be read"):
        OpenRelease(directory, manifest)


def test_files_that_may_not_be_read_are_refused(root, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("store.release.sha256_of", denied)
    (root / STAMPS / "v1.json").unlink()
    with pytest.raises(ReleaseError, match="Permission denied"):
        open_release(root, read_pointer(root).active)


def test_files_that_were_hashed_here_are_not_hashed_again(root, monkeypatch):
    hashed = []
    monkeypatch.setattr("store.release.sha256_of", lambda path: hashed.append(path) or "0" * 64)
    check_published(root, "v1")
    assert hashed == []
    os.utime(root / "v1" / MODEL)
    with pytest.raises(ReleaseError, match="corrupt"):
        check_published(root, "v1")
    assert hashed != []


@pytest.mark.parametrize("stamp", [None, b"", b"{}", b'{"catalog.mdb": 1}'])
def test_without_a_stamp_everything_is_hashed(root, stamp):
    path = root / STAMPS / "v1.json"
    path.unlink() if stamp is None else path.write_bytes(stamp)
    assert served(root) == "v1"
    assert msgspec.json.decode(path.read_bytes()).keys() == {CATALOG, MODEL, THRESHOLD}


def test_a_pointer_that_cannot_be_read_is_an_error_not_an_absence(root):
    (root / POINTER).write_bytes(b"{")
    with pytest.raises(ReleaseError, match="activate a release again"):
        read_pointer(root)
    activate(root, "v2")
    assert served(root) == "v2"


def test_no_rollback_to_what_is_not_what_served(root):
    activate(root, "v2")
    edit(root / "v1" / MANIFEST, lambda m: m.update(source="other"))
    with pytest.raises(ReleaseError, match="has changed"):
        rollback(root)
    assert served(root) == "v2"


def test_what_a_killed_replica_left_is_swept(tmp_path, root):
    (root / STAMPS / ".incoming-x").write_bytes(b"")
    publish(root, built(tmp_path, "v3"))
    assert sorted(p.name for p in (root / STAMPS).iterdir()) == ["v1.json", "v2.json", "v3.json"]


def test_the_list_shows_what_is_wrong(root):
    (root / "v2" / MANIFEST).unlink()
    listed = dict(published(root))
    assert isinstance(listed["v1"], Manifest)
    assert isinstance(listed["v2"], ReleaseError)


@pytest.mark.parametrize("name", DAMAGE)
def test_the_list_shows_every_damage(root, name):
    part, damage = DAMAGE[name]
    damage(root / "v2" / part)
    listed = dict(published(root))
    assert isinstance(listed["v1"], Manifest)
    assert isinstance(listed["v2"], ReleaseError)


def test_the_list_shows_a_catalog_of_another_schema(tmp_path, root, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("store.catalog.SCHEMA", 1)
        earlier.setattr("store.catalog_build.SCHEMA", 1)
        publish(root, built(tmp_path, "v0"))
    listed = dict(published(root))
    assert isinstance(listed["v1"], Manifest)
    assert "has schema 1" in str(listed["v0"])


def test_the_list_hashes_nothing_twice_and_everything_when_asked(root, monkeypatch):
    hashed = []
    monkeypatch.setattr("store.release.sha256_of", lambda path: hashed.append(path.name) or "0" * 64)
    assert all(isinstance(found, Manifest) for _, found in published(root))
    assert hashed == []
    assert all("corrupt" in str(found) for _, found in published(root, again=True))
    assert hashed == [CATALOG, CATALOG]


def test_a_large_release_that_changed_is_not_hashed_at_sight(root, monkeypatch):
    monkeypatch.setattr("store.release.HASHED_AT_SIGHT", 1)
    os.utime(root / "v1" / MODEL)
    assert isinstance(dict(published(root))["v1"], Unhashed)
    assert isinstance(dict(published(root, again=True))["v1"], Manifest)
    assert isinstance(dict(published(root))["v1"], Manifest)


BUILT_HALF = """
import os, signal, sys
from pathlib import Path
import store.release_publish as publish
from store.decision import ALWAYS, EVEN
publish.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publish.build(Path(sys.argv[1]), "v3", Path(sys.argv[2]), ALWAYS, EVEN)
"""


def test_a_build_that_was_killed_blocks_no_other(tmp_path):
    catalog = catalog_of(tmp_path / "rows", {"a": "b"})
    command = [sys.executable, "-c", BUILT_HALF, tmp_path / "built" / "v3", catalog]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=path, timeout=60, check=False).returncode == -9
    assert list((tmp_path / "built").iterdir()) != [], "it was killed before it began"
    build(tmp_path / "built" / "v3", "v3", catalog, ALWAYS, EVEN)
    assert [place.name for place in (tmp_path / "built").iterdir()] == ["v3"]


def test_parts_without_a_manifest_are_built_over_and_anything_else_is_not(tmp_path):
    catalog = catalog_of(tmp_path / "rows", {"a": "b"})
    place = tmp_path / "built" / "v3"
    place.mkdir(parents=True)
    (place / CATALOG).write_bytes(b"half")
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="exists"):
        build(place, "v3", catalog, ALWAYS, EVEN)
    (place / "notes.txt").unlink()
    build(place, "v3", catalog, ALWAYS, EVEN)
    assert verify(place).version == "v3"


def test_a_build_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        build(tmp_path / "built" / "v3", "v3", tmp_path / "none", ALWAYS, EVEN)
    assert list((tmp_path / "built").iterdir()) == []


def test_nothing_published_is_an_empty_list(tmp_path):
    assert published(tmp_path / "none") == []


def test_the_difference_of_two_releases(tmp_path):
    old = built(tmp_path, "v1", {"a": "1", "b": "2", "d": "4"})
    new = built(tmp_path, "v2", {"b": "two", "c": "3", "d": "4"}, threshold=Threshold(1, "t2", 0.7))
    found = diff(old, new)
    assert (found.added, found.removed, found.answers, found.features) == (("c",), ("a",), ("b",), ())
    assert (found.model, found.threshold) == (None, ("even", "t2"))
    assert diff(old, old).added == ()


KILLED = """
import os, signal, sys
from pathlib import Path
from store.release_publish import activate, publish, rollback
root, built, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
passed = 0
def checkpoint(step):
    global passed
    passed += 1
    if passed == at:
        os.kill(os.getpid(), signal.SIGKILL)
publish(root, built, checkpoint)
activate(root, "v3", checkpoint)
rollback(root, checkpoint)
"""


@pytest.mark.slow
def test_killed_at_any_step_the_old_or_the_new_release_serves(tmp_path, root):
    directory, after = built(tmp_path, "v3"), built(tmp_path, "v4")
    served_after_kill, code = [], -9
    while code == -9:
        copy = Path(shutil.copytree(root, tmp_path / f"releases-{len(served_after_kill)}"))
        command = [sys.executable, "-c", KILLED, copy, directory, str(len(served_after_kill) + 1)]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        code = subprocess.run(command, env=path, timeout=60, check=False).returncode
        served_after_kill.append(served(copy))
        for version, _ in published(copy):
            verify(copy / version)
        publish(copy, after)
        assert list(copy.glob(".incoming-*")) == [], "the next publisher sweeps what a killed one left"
    assert code == 0
    assert served_after_kill == ["v1"] * 8 + ["v3"] * 2 + ["v1"] * 2


def test_a_failed_publish_leaves_nothing(tmp_path, root):
    class DiskFullError(Exception):
        pass

    def checkpoint(step):
        if step == "flushed":
            raise DiskFullError

    with pytest.raises(DiskFullError):
        publish(root, built(tmp_path, "v3"), checkpoint)
    publish(root, built(tmp_path, "v4"))
    assert sorted(p.name for p in root.iterdir()) == [".lock", STAMPS, POINTER, "v1", "v2", "v4"]


def test_the_manifests_digest_is_that_of_its_bytes(root):
    manifest, digest = read_manifest(root / "v1")
    edit(root / "v1" / MANIFEST, lambda m: m.update(source="other"))
    assert read_manifest(root / "v1")[1] != digest
    assert manifest.source == ""
