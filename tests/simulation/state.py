"""State directories in memory: made once for a process, copied for each seed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from store.accounts import Accounts
from store.books import Books
from store.catalog_build import CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN
from store.journal import Journal
from store.limits_state import LimitsState
from store.release import CATALOG
from store.release_publish import activate, build, publish
from store.witness_outbox import WitnessOutbox
from tests.simulation import goldens


@cache
def _scratch() -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - memory, when there is such a thing
    made = tempfile.TemporaryDirectory(prefix="antiphon-sim-", dir=shared if shared.is_dir() else None)
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _empty_state() -> Path:
    """A state directory with every database made, to be copied."""
    state = _scratch() / "empty"
    (state / "journal").mkdir(parents=True)
    for made in (
        Books(state / "books.sqlite"),
        LimitsState(state / "limiter.sqlite"),
        Accounts(state / "accounts.sqlite"),
        *(Journal(state / "journal" / f"session.{n}.sqlite") for n in (0, 1)),
        *(WitnessOutbox(state / "journal" / f"batcher.{n}.sqlite") for n in (0, 1)),
    ):
        made.close()
    (state / "policy.toml").write_text(goldens.POLICY)
    return state


@cache
def releases() -> Path:
    """A catalog with one answer."""
    base = _scratch() / "made"
    base.mkdir()
    row = {
        "question": goldens.QUESTION,
        "answer": goldens.ANSWER,
        "approved_by": "Ada",
        "answered_on": "2026-03-01",
        "id": "e1",
    }
    (base / "rows.jsonl").write_text(json.dumps(row) + "\n")
    CatalogBuilder(open_source(base / "rows.jsonl")).build(base / CATALOG)
    build(base / "one", "one", base / CATALOG, ALWAYS, EVEN)
    root = _scratch() / "releases"
    publish(root, base / "one")
    activate(root, "one")
    return root


@contextmanager
def fresh_state() -> Iterator[Path]:
    """Yield a state directory, gone afterwards."""
    releases()
    state = _scratch() / "state"
    shutil.copytree(_empty_state(), state)
    try:
        yield state
    finally:
        shutil.rmtree(state)
