"""The same kernel tests on a card: `scripts/gpu_check` sets ANTIPHON_KERNELS_ON=card."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from gpu.cache import cache_directory
from gpu.kernels.cuda_device import STATIC_SHARED, CupyDevice
from tests.gpu.cuda.cpu_device import CpuModule


class KernelFunction(Protocol):
    """A kernel that takes NumPy arrays and changes them in place."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None: ...


class KernelModule(Protocol):
    """One .cu file."""

    def get_function(self, name: str) -> KernelFunction: ...


def runs_on_card() -> bool:
    return os.environ.get("ANTIPHON_KERNELS_ON") == "card"


def open_module(stem: str) -> KernelModule:
    return CardModule(stem) if runs_on_card() else CpuModule(stem)


_devices: list[CupyDevice] = []


class CardModule:
    """A cubin. Arrays go up before a launch and all of them come back after it: slow, and plain."""

    def __init__(self, stem: str) -> None:
        if not _devices:
            _devices.append(CupyDevice(cache_directory() / "cubins"))
        self.stem = stem

    def get_function(self, name: str) -> KernelFunction:
        return CardFunction(_devices[0], self.stem, name)


class CardFunction:
    def __init__(self, device: CupyDevice, stem: str, name: str) -> None:
        self.device, self.stem, self.name = device, stem, name
        self.max_dynamic_shared_size_bytes = STATIC_SHARED

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        with self.device.active():
            function = self.device.function(self.stem, self.name, self.max_dynamic_shared_size_bytes)
            on_card = [
                self.device.upload(argument) if isinstance(argument, np.ndarray) else argument
                for argument in arguments
            ]
            function(grid, block, tuple(on_card), shared_mem=shared_mem)
            for host, card in zip(arguments, on_card, strict=True):
                if isinstance(host, np.ndarray):
                    host[...] = card.get()
