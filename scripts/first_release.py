"""A new installation's catalog: some fifty questions about Antiphon itself, built and activated once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from scripts.failure import UsageFault
from store.catalog_build import CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN
from store.release import CATALOG, ReleaseError, read_pointer, sha256_of
from store.release_publish import activate, build, publish, published

QUESTIONS = Path(__file__).resolve().parent.parent / "docs" / "examples" / "questions.jsonl"
VERSION = "antiphon-1"


def activate_example(state: Path) -> None:
    """Build, publish and activate the example, unless this installation has had a release of any kind.

    Stopped half-way it is finished by the next call. Raises `UsageFault` when the releases cannot be read.
    """
    root = state / "releases"
    try:
        there = [version for version, _ in published(root)]
        if read_pointer(root) is not None or there not in ([], [VERSION]) or not QUESTIONS.exists():
            return
        if not there:
            _publish(root)
        activate(root, VERSION)
    except ReleaseError as error:
        raise UsageFault(str(error)) from error


def _publish(root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="antiphon-example-") as work:
        catalog, built = Path(work) / CATALOG, Path(work) / VERSION
        CatalogBuilder(open_source(QUESTIONS)).build(catalog)
        build(built, VERSION, catalog, ALWAYS, EVEN, source=sha256_of(QUESTIONS))
        publish(root, built)
