"""Models for the engine's tests: small random ones, made here, and the default one where it lies ready."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

DEFAULT = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def default_model():
    """The default model's file."""
    path = Path(os.environ.get("ANTIPHON_MODEL") or HERE.parent.parent / DEFAULT)
    if not path.exists():
        pytest.skip(f"no default model at {path}; scripts/up fetches it, or ANTIPHON_MODEL names it")
    return path


@pytest.fixture(scope="session", autouse=True)
def _own_tiles(tmp_path_factory):
    """Tiles of the tests' models go to a directory that goes away; compiled kernels stay where they are kept."""
    from gpu.kernels import host

    patch = pytest.MonkeyPatch()
    directory = tmp_path_factory.mktemp("tiles")
    patch.setattr(host, "cache_directory", lambda: directory)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny GGUF in Q4_0 with a Q8_0 embedding."""
    import tiny_models

    kinds = {"token_embd.weight": "Q8_0", "blk.0.ffn_down.weight": "Q4_1", "blk.1.ffn_down.weight": "F16"}
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return tiny_models.write_gguf(path, tiny_models.random_weights(), "Q4_0", kinds=kinds)
