"""Kernel tests run the CUDA text on the CPU (see `shim.h`), or on a card when `scripts/gpu_check` asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.gpu.cuda.card import KernelFunction, KernelModule, open_module, runs_on_card
from tests.gpu.cuda.cpu_device import COMPILER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if COMPILER or runs_on_card():
        return
    skip = pytest.mark.skip(reason="no g++ here: the CUDA text cannot be run on the CPU")
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel() -> Callable[[str, str], KernelFunction]:
    """A kernel by file and name; the file is compiled when it is first asked for."""
    modules: dict[str, KernelModule] = {}

    def find(stem: str, name: str) -> KernelFunction:
        if stem not in modules:
            modules[stem] = open_module(stem)
        return modules[stem].get_function(name)

    return find


@pytest.fixture
def random(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's own name: every test draws its own numbers, the same each time."""
    return np.random.default_rng(list(request.node.name.encode()))
