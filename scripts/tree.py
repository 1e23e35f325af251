"""The tree that `antiphon serve` runs, as data made from the settings."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.kernels.cuda_cards import Card
from scripts.config import Config
from supervision.nng import MAX_PATH
from supervision.spec import ChildSpec, SupervisorSpec
from supervision.supervisor import leaves

ALIAS = "default"
"""Always names the main model."""
LOADING = 600.0
"""Seconds a batcher may take to load a model (and, the very first time, to compile its kernels)."""
HOST_BATCH = 64
"""Sequences in one step on a processor, when nothing else is said: more of them only wait for each other."""
LONGEST_STEP = 30.0
"""Seconds: a batcher that has work and finished no step for this long is stuck. A slow processor's prefill is not."""
ENDING = 5.0
"""Seconds an edge has beyond its drain to end what is still open."""
DEFAULT_PRICES: tuple[dict[str, Any], ...] = (
    {"model": "*", "prompt": 100_000, "cached": 50_000, "completion": 400_000, "fast_answer": 5},
)
"""In micro-units per million tokens, and per fast answer."""
SALT = "exploration.salt"


@frozen
class ServedModel:
    """What the actors must know of the main model. `created` is in Unix seconds."""

    name: str
    path: Path
    context_length: int
    vocab_size: int
    created: int


def tree(
    config: Config, model: ServedModel, listen: int, cards: tuple[Card, ...] = (), salt: str = ""
) -> SupervisorSpec:
    """Return the whole tree. `listen` is the descriptor of the listening socket, which every edge inherits.

    Each of `cards` gets a batcher; without any, one runs on the processor. `salt` draws the owners whose fast
    answers are explored.
    """
    groups = (
        _books(config),
        _guards(config, model, salt),
        _engines(config, model, cards),
        _talk(config, model),
        _doors(config, model, listen),
    )
    return SupervisorSpec("antiphon", "one_for_one", groups)


def longest_state_path(config: Config) -> int:
    """Bytes that a state directory's path may have: each actor of the tree has a socket in its `run/`."""
    any_model = ServedModel("", Path(), 0, 0, 0)
    longest = max(len(child.name) for child in leaves(tree(config, any_model, 0)))
    return MAX_PATH - len("/run/.ipc") - longest


def _books(config: Config) -> SupervisorSpec:
    limits = {
        "requests_per_minute": config.requests_per_minute,
        "tokens_per_minute": config.tokens_per_minute,
        "concurrency": config.concurrent_requests,
    }
    ledger = ChildSpec("ledger", "actors.ledger:Ledger", {"prices": DEFAULT_PRICES})
    limiter = ChildSpec("limiter", "actors.limiter:Limiter", limits)
    return SupervisorSpec("books", "rest_for_one", (ledger, limiter))


def kept_salt(state: Path) -> str:
    """Return the salt of this installation, drawn once: who is explored stays so over restarts.

    Nobody else may read it, for whoever knows it can tell who is explored. Raises `OSError`.
    """
    path = state / SALT
    if not path.exists():
        descriptor, name = tempfile.mkstemp(prefix=f".{SALT}-", dir=state)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(16))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another start drew one meanwhile
                os.link(name, path)
        finally:
            Path(name).unlink()
    return path.read_text(encoding="utf-8").strip()


def _guards(config: Config, model: ServedModel, salt: str) -> SupervisorSpec:
    policy = {"policy": str(Path(config.policy).resolve()) if config.policy else ""}
    safety = [ChildSpec(f"safety.{i}", "actors.safety:Safety", policy) for i in range(config.safety_replicas)]
    fallback = ChildSpec("safety_fallback", "actors.safety:Safety", policy)
    router = ChildSpec(
        "router", "actors.router:Router", {"models": (model.name,), "aliases": {ALIAS: model.name}}
    )
    releases = {
        "release_root": str(_state(config) / "releases"),
        "feedback_root": str(_state(config) / "feedback"),
        "explore": config.fast_answer_explore,
        "salt": salt,
    }
    answers = [
        ChildSpec(f"fast_answer.{i}", "actors.fast_answer:FastAnswer", releases)
        for i in range(config.fast_answer_replicas)
    ]
    return SupervisorSpec("guards", "one_for_one", (*safety, fallback, router, *answers))


def _engines(config: Config, model: ServedModel, cards: tuple[Card, ...]) -> SupervisorSpec:
    common: dict[str, object] = {
        "model": str(model.path),
        "name": model.name,
        "kv_bytes": config.kv_mib << 20,
    }
    host: dict[str, object] = {
        "engine": "scripted" if config.engine == "scripted" else "host",
        "threads": config.threads,
        "max_batch": config.max_batch or HOST_BATCH,
    }
    on_cards: list[dict[str, object]] = [
        {"engine": "cuda", "device": card.uuid, "device_name": card.name, "max_batch": config.max_batch}
        for card in cards
    ]
    batchers = [
        ChildSpec(
            f"batcher.{i}",
            "actors.batcher:Batcher",
            common | settings,
            ready_within=LOADING,
            watchdog=LONGEST_STEP,
        )
        for i, settings in enumerate(on_cards or [host])
    ]
    return SupervisorSpec("engines", "one_for_one", tuple(batchers))


def _talk(config: Config, model: ServedModel) -> SupervisorSpec:
    settings = {
        "models": {model.name: str(model.path)},
        "aliases": {ALIAS: model.name},
        "tokenizer": "bytes" if config.engine == "scripted" else "model",
        "disconnect_grace": config.disconnect_grace,
        "fast_answer_pace": config.fast_answer_pace,
    }
    hosts = [ChildSpec(f"session.{i}", "actors.session:Session", settings) for i in range(config.sessions)]
    return SupervisorSpec("talk", "one_for_one", tuple(hosts))


def _doors(config: Config, model: ServedModel, listen: int) -> SupervisorSpec:
    settings = {
        "models": (
            {
                "name": model.name,
                "aliases": (ALIAS,),
                "context_length": model.context_length,
                "vocab_size": model.vocab_size,
                "created": model.created,
            },
        ),
        "accounts": _accounts(config),
        "feedback_root": str(_state(config) / "feedback"),
        "keepalive": config.keepalive,
        "drain_seconds": config.drain,
    }
    edges = [
        ChildSpec(
            f"edge.{i}",
            "actors.edge.actor:Edge",
            settings,
            files={"listen": listen},
            grace=config.drain + ENDING,
        )
        for i in range(config.edges)
    ]
    return SupervisorSpec("doors", "one_for_one", tuple(edges))


def _state(config: Config) -> Path:
    return Path(config.state).expanduser().resolve()


def _accounts(config: Config) -> str:
    return str(_state(config) / "accounts.sqlite")
