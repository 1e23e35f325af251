"""A new installation's catalog: some fifty questions about Antiphon itself, built and activated once.

When a program of another format finds it active, it is built again under the next version.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import lmdb
import msgspec

from store.catalog import CatalogError
from store.catalog_build import BuildRefused, CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN, DecisionError
from store.release import (
    CATALOG,
    MANIFEST,
    Manifest,
    ReleaseError,
    Unhashed,
    examine_named,
    read_pointer,
    sha256_of,
)
from store.release_publish import activate, build, publish, published

QUESTIONS = Path(__file__).resolve().parent.parent / "docs" / "examples" / "questions.jsonl"
VERSION = "antiphon-1"
MEND = (
    "antiphon release list shows those that can serve, activate takes one, build and publish make a new one"
)
"""What to do about an active release that is refused, and about a pointer that cannot be read."""
_number_of = re.compile(r"antiphon-([0-9]{1,9})").fullmatch


class _Made(msgspec.Struct):
    """What a manifest of any format says that tells the example from an operator's release."""

    version: str
    model: str
    threshold: str
    parents: tuple[str, ...] = ()


def activate_example(state: Path) -> str:
    """Build, publish and activate the example, unless this installation has had a release of any kind.

    Stopped half-way it is finished by the next call. An example that is refused, as after a change of format,
    gives way to one built now; an operator's release is left alone. Returns one line on what was wrong or
    still is, "" when nothing is: fast answers that cannot be had keep nobody from serving.
    """
    root = state / "releases"
    try:
        return _settle(root)
    except (ReleaseError, CatalogError, DecisionError, BuildRefused, lmdb.Error, OSError) as error:
        return f"fast answers are off: {error}; {MEND}"


def _settle(root: Path) -> str:
    pointer = read_pointer(root)
    if pointer is None:
        if QUESTIONS.exists() and all(is_example(root / version) for version, _ in published(root)):
            activate(root, _current(root))
        return ""
    try:
        examine_named(root, pointer.active)
    except Unhashed:
        return ""
    except ReleaseError as fault:
        refused = pointer.active.version
        if not QUESTIONS.exists() or not is_example(root / refused):
            raise
        version = _current(root)
        activate(root, version)
        return f"the example {refused} was refused ({fault}): {version} takes its place"
    return ""


def is_example(release: Path) -> bool:
    """Say whether a published release, of whatever format, is the example and not an operator's."""
    try:
        made = msgspec.json.decode((release / MANIFEST).read_bytes(), type=_Made)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return (
        _number_of(release.name) is not None
        and (made.version, made.model, made.threshold) == (release.name, ALWAYS.version, EVEN.version)
        and not made.parents  # `antiphon release build` names the release that was active
    )


def _current(root: Path) -> str:
    """Return a version of the example that can be served, built now if there is none."""
    there, source = published(root), sha256_of(QUESTIONS)
    for version, found in there:
        if isinstance(found, Manifest) and found.source == source and is_example(root / version):
            return version
    taken = [int(number[1]) for version, _ in there if (number := _number_of(version))]
    version = f"antiphon-{max(taken) + 1}" if taken else VERSION
    _publish(root, version, source)
    return version


def _publish(root: Path, version: str, source: str) -> None:
    with tempfile.TemporaryDirectory(prefix="antiphon-example-") as work:
        catalog, built = Path(work) / CATALOG, Path(work) / version
        CatalogBuilder(open_source(QUESTIONS)).build(catalog)
        build(built, version, catalog, ALWAYS, EVEN, source=source)
        publish(root, built)
