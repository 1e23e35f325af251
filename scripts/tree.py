"""The tree that `antiphon serve` runs, as data made from the settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import frozen

from scripts.config import Config
from supervision.spec import ChildSpec, SupervisorSpec


@frozen
class ServedModel:
    """What the actors must know of the main model. `created` is in Unix seconds."""

    name: str
    path: Path
    context_length: int
    vocab_size: int
    created: int


def tree(config: Config, model: ServedModel, listen: int, credentials_url: str) -> SupervisorSpec:
    """Return the whole tree. `listen` is the descriptor of the listening socket, which every edge inherits."""
    state = Path(config.state).resolve()
    groups = (
        _books(config, state),
        _guards(config, state, model),
        _engines(config, state, model),
        _talk(config, state, model),
        _doors(config, state, model, listen, credentials_url),
    )
    return SupervisorSpec("antiphon", "one_for_one", groups)
