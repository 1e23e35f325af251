"""Settings: `antiphon.toml`, then `ANTIPHON_*`, then flags. An unknown key is an error that names it."""

from __future__ import annotations

import math
import os
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from scripts.failure import UsageFault

FILE = "antiphon.toml"
PREFIX = "ANTIPHON_"
NOT_SETTINGS = frozenset(
    PREFIX + name
    for name in (
        "MODELS",
        "CACHE",
        "ISA",
        "CHAOS",
        "KERNELS_ON",
        "LLAMA_SERVER",
        "BENCH_ENTRIES",
        "BENCH_LARGE",
    )
)
"""Variables that other parts read: where models and caches are kept, which kernels to use, what benchmarks and chaos need."""


MOST_PROCESSES = 256
"""Of one kind: beyond it they only take memory from each other, on any machine."""
MOST_SEQUENCES = 2047
"""In one step: the largest step of any engine, a GPU's, has 2048 tokens."""


def _positive(_config: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageFault(f"{attribute.name} is {value}: it must be a finite number above 0")


def _not_negative(_config: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageFault(f"{attribute.name} is {value}: it must be a finite number, 0 or more")


def _processes(_config: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 1 <= value <= MOST_PROCESSES:
        raise UsageFault(f"{attribute.name} is {value}: it must be from 1 to {MOST_PROCESSES}")


def _processes_or_none(_config: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 <= value <= MOST_PROCESSES:
        raise UsageFault(f"{attribute.name} is {value}: it must be from 0 to {MOST_PROCESSES}")


def _sequences(_config: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 <= value <= MOST_SEQUENCES:
        raise UsageFault(
            f"{attribute.name} is {value}: it must be from 0 (what suits the engine) to {MOST_SEQUENCES}"
        )


def _cores(_config: object, attribute: attrs.Attribute[Any], value: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if not 0 <= value <= cores:
        raise UsageFault(
            f"{attribute.name} is {value}: it must be from 0 (follows the cores) to {cores}, the cores this"
            " process may use"
        )


def _share(_config: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageFault(f"{attribute.name} is {value}: it must be from 0 to 1")


def _port(_config: object, _attribute: object, value: int) -> None:
    if not 0 <= value <= 65535:
        raise UsageFault(f"port is {value}: it must be from 0 (any free one) to 65535")


@frozen
class Config:
    """Everything `antiphon serve` can be told. Durations are in seconds."""

    state: str = "./var"
    host: str = "127.0.0.1"
    port: int = field(default=8000, validator=_port)
    model: str = "smollm2-135m-instruct"
    engine: str = field(default="auto", validator=attrs.validators.in_(("auto", "host", "cuda", "scripted")))
    threads: int = field(default=0, validator=_cores)
    """Of the CPU engine; 0 follows the cores."""
    kv_mib: int = field(default=0, validator=_not_negative)
    """Memory for KV blocks; 0 sizes it from what is free after a warm-up."""
    max_batch: int = field(default=0, validator=_sequences)
    """Sequences in one step at most; 0 is what suits the engine: 64 on a processor, 128 on a GPU."""
    edges: int = field(default=1, validator=_processes)
    sessions: int = field(default=1, validator=_processes)
    safety_replicas: int = field(default=1, validator=_processes)
    fast_answer_replicas: int = field(default=1, validator=_processes_or_none)
    fast_answer_explore: float = field(default=0.0, validator=_share)
    """Share of owners whose fast answers are decided by a coin, for a decision model to learn from."""
    fast_answer_pace: float = field(default=0.0, validator=_not_negative)
    """Characters a second of a catalog's answer that is streamed; 0 gives it at once."""
    policy: str = ""
    """A safety policy file (TOML); empty is the one that comes with Antiphon."""
    disconnect_grace: float = field(default=10.0, validator=_not_negative)
    drain: float = field(default=10.0, validator=_positive)
    keepalive: float = field(default=12.0, validator=_positive)
    requests_per_minute: int = field(default=6000, validator=_positive)
    tokens_per_minute: int = field(default=4_000_000, validator=_positive)
    concurrent_requests: int = field(default=512, validator=_positive)


def seconds(text: str) -> float:
    """Read a flag's duration: a number, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text!r}")
    return found


def load(
    flags: Mapping[str, Any], *, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Return the settings that hold. `flags` holds those given on the command line (None: not given).

    Raises `UsageFault` that names the key, and where it stands.
    """
    values: dict[str, Any] = {}
    values.update(_from_file((directory or Path()) / FILE))
    values.update(_from_environment(os.environ if environ is None else environ))
    values.update({key: value for key, value in flags.items() if value is not None})
    try:
        return Config(**values)
    except ValueError as error:
        raise UsageFault(f"settings: {error.args[0]}") from error


def _fields() -> dict[str, attrs.Attribute[Any]]:
    return {a.name: a for a in attrs.fields(Config)}


def _from_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path}: not valid TOML: {error}") from error
    return {key: _typed(key, value, f"{path}: ") for key, value in data.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            found[name.removeprefix(PREFIX).lower()] = _typed(
                name.removeprefix(PREFIX).lower(), text, f"{name}: "
            )
    return found


def _typed(key: str, value: Any, where: str) -> Any:
    known = _fields()
    if key not in known:
        raise UsageFault(f"{where}unknown setting {key!r}; known are {', '.join(sorted(known))}")
    wanted = {"str": str, "int": int, "float": float}[str(known[key].type)]
    if isinstance(value, str) and wanted is not str:
        try:
            return wanted(value)
        except ValueError as error:
            raise UsageFault(f"{where}{key} is {value!r}: it must be a number") from error
    if isinstance(value, bool) or not isinstance(value, (wanted, int) if wanted is float else wanted):
        raise UsageFault(f"{where}{key} is {value!r}: it must be of type {wanted.__name__}")
    return value
