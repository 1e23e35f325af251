"""Building, publishing and activating releases. Each step is whole or has not happened.

A release is published as a new directory: copied beside its place, flushed, checked, renamed, and the rename
flushed. Activating is one rename of the pointer. One writer at a time holds a lock that dies with it.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from attrs import frozen

from store.catalog import Catalog, Entry
from store.decision import Model, Threshold, write
from store.durable import INCOMING, Checkpoint, flush, go_on, replace_file
from store.normalise import NORMALISER
from store.release import (
    CATALOG,
    MANIFEST,
    MODEL,
    PARTS,
    POINTER,
    SCHEMA,
    STAMPS,
    THRESHOLD,
    FileFacts,
    Manifest,
    Named,
    OpenRelease,
    Pointer,
    ReleaseError,
    check_published,
    check_sizes,
    check_version,
    examine,
    read_manifest,
    read_pointer,
    sha256_of,
    stamps_of,
    verify,
    write_stamps,
)

LOCK: Final = ".lock"
BUILDING: Final = ".building-"
"""How the name of a directory begins in which a release is being built, or was when its builder was killed."""
REMEMBERED: Final = 20
"""Releases the pointer remembers, to go back to."""


def build(
    target: Path,
    version: str,
    catalog: Path,
    model: Model,
    threshold: Threshold,
    *,
    parents: tuple[str, ...] = (),
    source: str = "",
) -> Manifest:
    """Put a release together in a new directory. `catalog` is copied. Raises `ReleaseError`.

    It is built beside its place and renamed, so that one cut short blocks no other. Builds side by side wait
    for each other.
    """
    check_version(version)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(target.parent):
        for left in target.parent.glob(f"{BUILDING}*"):
            shutil.rmtree(left)
        if target.exists() and not _is_unfinished(target):
            raise ReleaseError(f"{target} exists: a release is built once; choose another version")
        work = Path(tempfile.mkdtemp(prefix=BUILDING, dir=target.parent))
        try:
            manifest = _build(work, version, catalog, model, threshold, parents, source)
            work.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            work.rename(target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return manifest


def _is_unfinished(target: Path) -> bool:
    """Say whether a directory is what a killed build left: parts of a release, without the manifest."""
    return target.is_dir() and {path.name for path in target.iterdir()} <= set(PARTS)


def _build(
    target: Path,
    version: str,
    catalog: Path,
    model: Model,
    threshold: Threshold,
    parents: tuple[str, ...],
    source: str,
) -> Manifest:
    shutil.copyfile(catalog, target / CATALOG)
    write(model, target / MODEL)
    write(threshold, target / THRESHOLD)
    opened = Catalog(catalog)
    manifest = Manifest(
        schema=SCHEMA,
        version=version,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        normaliser_version=NORMALISER.version,
        normaliser=opened.about.normaliser,
        entries=opened.about.entries,
        keys=opened.about.keys,
        model=model.version,
        threshold=threshold.version,
        files={name: FileFacts((target / name).stat().st_size, sha256_of(target / name)) for name in PARTS},
        parents=parents,
        source=source,
    )
    opened.close()
    (target / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return verify(target)


def publish(root: Path, built: Path, checkpoint: Checkpoint = go_on) -> Manifest:
    """Copy a built release among the published ones, flushed to the disk. Once is as good as twice.

    Raises `ReleaseError` for a release that does not verify, or a version that is taken by another.
    """
    manifest, digest = read_manifest(built)
    check_sizes(built, manifest)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        _sweep(root)
        place = root / check_version(manifest.version)
        if place.exists():
            return _already_published(place, digest)
        incoming = Path(tempfile.mkdtemp(prefix=INCOMING, dir=root))
        for name in (*PARTS, MANIFEST):
            shutil.copyfile(built / name, incoming / name)
            flush(incoming / name)
            checkpoint(f"copied {name}")
        verify(incoming)
        incoming.chmod(0o755)
        flush(incoming)
        checkpoint("flushed")
        incoming.rename(place)
        checkpoint("renamed")
        flush(root)
        write_stamps(root, manifest.version, stamps_of(place, manifest))
        checkpoint("published")
    return manifest


def _already_published(place: Path, digest: str) -> Manifest:
    manifest, there = read_manifest(place)
    if there != digest:
        raise ReleaseError(
            f"{place.name} is published already with other content: releases never change, take a new version"
        )
    return manifest


def _sweep(root: Path) -> None:
    """Remove what killed publishers left. The lock is held, so nobody is at work on it."""
    for left in (*root.glob(f"{INCOMING}*"), *(root / STAMPS).glob(f"{INCOMING}*")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)


def activate(root: Path, version: str, checkpoint: Checkpoint = go_on) -> Pointer:
    """Make a published release the one that serves, once it is known to be whole. Raises `ReleaseError`.

    A pointer that cannot be read is replaced, and what served before is forgotten with it.
    """
    named = _servable(root, version)
    with _locked(root):
        try:
            now = read_pointer(root)
        except ReleaseError:
            now = None
        if now is not None and now.active == named:
            return now
        before = (*now.before, now.active)[-REMEMBERED:] if now else ()
        return _point(root, Pointer(named, now.sequence + 1 if now else 1, before), checkpoint)


def rollback(root: Path, checkpoint: Checkpoint = go_on) -> Pointer:
    """Make the release that served before serve again.

    Raises `ReleaseError` when there is none, when it is not whole, or when another was activated meanwhile.
    """
    now = read_pointer(root)
    if now is None or not now.before:
        raise ReleaseError("no release served before the present one: nothing to go back to")
    named = _servable(root, now.before[-1].version)
    if named != now.before[-1]:
        raise ReleaseError(f"{named.version} is not what served before: its manifest has changed")
    with _locked(root):
        if read_pointer(root) != now:
            raise ReleaseError("another release was activated meanwhile: list the releases and try again")
        return _point(root, Pointer(named, now.sequence + 1, now.before[:-1]), checkpoint)


def _servable(root: Path, version: str) -> Named:
    """Check a published release as a replica would, so that no pointer ever names one that cannot serve."""
    manifest, digest = check_published(root, version)
    OpenRelease(root / version, manifest).close()
    return Named(version, digest)


def published(root: Path, *, again: bool = False) -> list[tuple[str, Manifest | ReleaseError]]:
    """List the published releases by version, with what is wrong with those that cannot be served.

    Large files that were hashed on this host before are not hashed again, unless `again`.
    """
    listed: list[tuple[str, Manifest | ReleaseError]] = []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        if place.is_dir() and not place.name.startswith("."):
            try:
                listed.append((place.name, examine(root, place.name, again=again)[0]))
            except ReleaseError as error:
                listed.append((place.name, error))
    return listed


@frozen
class Difference:
    """What changes from one release to another. Names are the entries' keys as text."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    answers: tuple[str, ...]
    """Entries with another answer."""
    features: tuple[str, ...]
    """Entries with the same answer and other features."""
    model: tuple[str, str] | None
    threshold: tuple[str, str] | None


def diff(old: Path, new: Path) -> Difference:
    """Compare two releases that verify. Both catalogs are read once, in key order."""
    before, after = verify(old), verify(new)
    added, removed, answers, features = [], [], [], []
    for key, was, now in _side_by_side(old / CATALOG, new / CATALOG):
        if was is None:
            added.append(key)
        elif now is None:
            removed.append(key)
        elif was.answer != now.answer:
            answers.append(key)
        elif was.features != now.features:
            features.append(key)
    return Difference(
        added=tuple(added),
        removed=tuple(removed),
        answers=tuple(answers),
        features=tuple(features),
        model=None if before.model == after.model else (before.model, after.model),
        threshold=None if before.threshold == after.threshold else (before.threshold, after.threshold),
    )


def _side_by_side(old: Path, new: Path) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Merge two catalogs: every key of either, with its entries."""
    catalogs = Catalog(old), Catalog(new)
    try:
        left, right = (catalog.items() for catalog in catalogs)
        was, now = next(left, None), next(right, None)
        while was or now:
            key = min(found[0] for found in (was, now) if found)
            in_old, in_new = was is not None and was[0] == key, now is not None and now[0] == key
            yield key.decode(), was[1] if was and in_old else None, now[1] if now and in_new else None
            was = next(left, None) if in_old else was
            now = next(right, None) if in_new else now
    finally:
        for catalog in catalogs:
            catalog.close()


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the writers' lock; it ends with the process that holds it."""
    with (root / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold a directory against other builders; it is let go by the process's end."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _point(root: Path, pointer: Pointer, checkpoint: Checkpoint) -> Pointer:
    replace_file(root / POINTER, msgspec.json.encode(pointer), checkpoint)
    return pointer
