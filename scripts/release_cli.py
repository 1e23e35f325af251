"""`antiphon release`: build, check, publish, activate and compare releases of fast answers."""

from __future__ import annotations

import argparse
import datetime as dt
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import msgspec

from scripts.catalog_cli import add_common, build_with_progress, print_facts, print_json
from scripts.failure import UsageFault
from store.catalog import CatalogError
from store.catalog_build import BuildRefused
from store.decision import ALWAYS, EVEN, SCHEMA, DecisionError, Model, Threshold, read_model
from store.release import (
    CATALOG,
    Manifest,
    ReleaseError,
    check_version,
    read_pointer,
    sha256_of,
    verify,
)
from store.release_publish import activate, build, diff, publish, published, rollback

SHOWN = 20
"""Lines of one kind a person is shown; `--json` has all of them."""
ABOUT = "{entries:,} entries, model {model}, threshold {threshold}, {created}"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon release`."""
    help_text = "versions of fast answers: build, publish, activate, go back"
    commands = subparsers.add_parser("release", help=help_text).add_subparsers(
        required=True, metavar="ACTION"
    )
    _add_build(commands)
    _add(commands, "verify", verify_command, "check every byte of a release", "release")
    publishing = _add(
        commands, "publish", publish_command, "put a built release among those that can serve", "release"
    )
    publishing.add_argument("--to", default="", help="object storage instead, as s3://bucket/prefix")
    fetching = _add(
        commands, "fetch", fetch_command, "publish a release here that object storage has", "release"
    )
    fetching.add_argument("--from", dest="source", required=True, help="s3://bucket/prefix and the like")
    _add(commands, "activate", activate_command, "let a published release serve", "release")
    _add(commands, "rollback", rollback_command, "let the release before serve again")
    listing = _add(commands, "list", list_command, "the published releases, and what is wrong with any")
    listing.add_argument("--verify", action="store_true", help="hash every byte of them")
    _add(commands, "diff", diff_command, "what changes from one release to another", "old", "new")


def _add(commands: Any, name: str, handler: Any, help_text: str, *positional: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
    for argument in positional:
        command.add_argument(argument, help="a version, or the directory of a release")
    add_common(command)
    command.set_defaults(handler=_told(handler))
    return command


def _add_build(commands: Any) -> None:
    command = _add(commands, "build", build_command, "put a release together")
    command.add_argument("--version", default="", help="its name; else made from the time")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, help="approved rows to build the catalog from")
    source.add_argument("--catalog", type=Path, help="a catalog that was built")
    command.add_argument("--model", type=Path, help="a decision model; else every answer is good enough")
    command.add_argument("--threshold", type=float, help="serve at this score and above (default 0.5)")
    command.add_argument("--threshold-version", default="", help="its name; needed with --threshold")
    command.add_argument("--keep-going", action="store_true", help="leave out rows that cannot go in")
    command.add_argument("--out", type=Path, help="where to build it; else <state>/builds/<version>")


def _told(handler: Any) -> Any:
    """Turn what is wrong with a release into the one line a person is told."""

    def run(args: argparse.Namespace) -> int:
        try:
            code: int = handler(args)
        except (ReleaseError, DecisionError, CatalogError) as error:
            raise UsageFault(str(error)) from error
        except BrokenPipeError:
            raise  # nothing is wrong: who reads the output has left
        except OSError as error:
            raise UsageFault(f"{error.filename or args.state}: {error.strerror or error}") from error
        return code

    return run


def build_command(args: argparse.Namespace) -> int:
    """Build a release, its catalog too if rows are given. Returns 1 when rows cannot go in."""
    if (args.threshold is None) != (not args.threshold_version):
        raise UsageFault(
            "--threshold and --threshold-version go together: a threshold is known by its version"
        )
    version = check_version(args.version or f"r{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}")
    model: Model = read_model(args.model) if args.model else ALWAYS
    threshold = EVEN if args.threshold is None else Threshold(SCHEMA, args.threshold_version, args.threshold)
    target = args.out or args.state / "builds" / version
    active, _ = _active(args.state / "releases")
    parents = (active,) if active else ()
    with tempfile.TemporaryDirectory(prefix="antiphon-catalog-") as work:
        catalog, source = args.catalog, ""
        if args.rows:
            catalog, source = Path(work) / CATALOG, sha256_of(args.rows)
            try:
                build_with_progress(args.rows, catalog, keep_going=args.keep_going, quiet=args.json)
            except BuildRefused as refused:
                for problem in refused.report.problems[:SHOWN]:
                    print(f"row {problem.line}: {problem.kind}: {problem.text}")
                raise UsageFault(str(refused)) from refused
        manifest = build(target, version, catalog, model, threshold, parents=parents, source=source)
    print_facts({"built": str(target), **_facts(manifest)}, args.json)
    return 0


def verify_command(args: argparse.Namespace) -> int:
    """Check a release, byte for byte."""
    print_facts({"verified": args.release, **_facts(verify(_place(args.state, args.release)))}, args.json)
    return 0


def publish_command(args: argparse.Namespace) -> int:
    """Publish a release here, or push it to object storage."""
    built = _place(args.state, args.release, prefer="builds")
    if args.to:
        objects = _objects()
        manifest = objects.push(objects.open_store(args.to), built)
    else:
        manifest = publish(args.state / "releases", built)
        if built.parent == args.state / "builds":
            shutil.rmtree(built)
    print_facts({"published": args.to or str(args.state / "releases"), **_facts(manifest)}, args.json)
    return 0


def fetch_command(args: argparse.Namespace) -> int:
    """Publish a release here that object storage has."""
    objects = _objects()
    manifest = objects.pull(objects.open_store(args.source), args.release, args.state / "releases")
    print_facts({"fetched": args.source, **_facts(manifest)}, args.json)
    return 0


def activate_command(args: argparse.Namespace) -> int:
    """Let a published release serve; running replicas take it up within a second."""
    pointer = activate(args.state / "releases", args.release)
    print_facts({"active": pointer.active.version, "sequence": pointer.sequence}, args.json)
    return 0


def rollback_command(args: argparse.Namespace) -> int:
    """Let the release before serve again."""
    pointer = rollback(args.state / "releases")
    print_facts({"active": pointer.active.version, "sequence": pointer.sequence}, args.json)
    return 0


def list_command(args: argparse.Namespace) -> int:
    """List the published releases; the active one has a star. Returns 1 when bytes were to be verified and are wrong."""
    root = args.state / "releases"
    active, fault = _active(root)
    rows = [
        {"version": version, "active": version == active, **_listed(found)}
        for version, found in published(root, again=args.verify)
    ]
    code = int(args.verify and any("fault" in row for row in rows))
    if args.json:
        print_json({"releases": rows, "active": active or None} | ({"fault": fault} if fault else {}))
        return code
    for row in rows:
        mark = "*" if row["active"] else " "
        about = row.get("fault") or ABOUT.format(**row)
        print(f"{mark} {row['version']:24} {about}")
    if not rows:
        print(f"no releases in {root}")
    if fault or (active and active not in {row["version"] for row in rows}):
        print(fault or f"{active} is active, and not there: activate another")
    return code


def _active(root: Path) -> tuple[str, str]:
    """Return the active version, or "" and what is wrong with the pointer."""
    try:
        pointer = read_pointer(root)
    except ReleaseError as error:
        return "", str(error)
    return pointer.active.version if pointer else "", ""


def diff_command(args: argparse.Namespace) -> int:
    """Print what changes from one release to another."""
    found = diff(_place(args.state, args.old), _place(args.state, args.new))
    if args.json:
        print_json(attrs.asdict(found))
        return 0
    for mark, keys in (("+", found.added), ("-", found.removed), ("~", found.answers)):
        for key in keys[:SHOWN]:
            print(f"{mark} {key}")
    print(
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.answers)} with another answer, ",
        end="",
    )
    print(f"{len(found.features)} with other features")
    for what, change in (("model", found.model), ("threshold", found.threshold)):
        if change:
            print(f"{what}: {change[0]} → {change[1]}")
    return 0


def _place(state: Path, name: str, prefer: str = "releases") -> Path:
    """Return the directory of a release: a path as it is, a version among the published or the built ones."""
    if "/" in name:
        return Path(name)
    places = [state / room / check_version(name) for room in ("releases", "builds")]
    places.sort(key=lambda place: place.parent.name != prefer)
    for place in places:
        if place.is_dir():
            return place
    raise ReleaseError(f"no release {name}: neither published nor built in {state}")


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(manifest)
    del facts["files"], facts["schema"]
    return facts


def _listed(found: Manifest | ReleaseError) -> dict[str, Any]:
    if isinstance(found, ReleaseError):
        return {"fault": str(found)}
    return {
        "entries": found.entries,
        "model": found.model,
        "threshold": found.threshold,
        "created": found.created,
    }


def _objects() -> Any:
    try:
        from store import release_objects  # noqa: PLC0415  optional
    except ImportError as error:
        raise UsageFault("object storage needs obstore: pip install 'antiphon[objects]'") from error
    return release_objects
