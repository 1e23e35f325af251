"""A device whose memory is NumPy's and whose kernels run on the CPU: the whole CUDA path, with no GPU.

Its stream is a card's at its slowest: nothing runs before something waits for it. What is overwritten too soon, or
read too soon, is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from tests.gpu.cuda.arrays import guarded
from tests.gpu.cuda.card import KernelModule, open_module


@define(eq=False)
class ShimDevice:
    """Counts what it gives out, so that a test can say that a step took nothing."""

    modules: dict[str, KernelModule]
    total: int = 1 << 30
    allocations: int = 0
    used: int = 0
    replays: int = 0
    launched: list[str] = field(factory=list)
    closed: bool = False
    recording: list[Any] | None = None
    is_active: bool = False
    stream: list[Callable[[], None]] = field(factory=list)

    def wait(self) -> None:
        """Run what the stream holds, in order."""
        queued, self.stream = self.stream, []
        for start in queued:
            start()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.is_active = True
        yield
        self.is_active = False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        poison = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        return self.upload(poison.view(dtype).reshape(shape))

    def upload(self, host: NDArray[Any]) -> NDArray[Any]:
        assert self.is_active, "the card is used outside `active`"
        assert self.recording is None, "memory is taken while a graph is captured"
        self.allocations += 1
        self.used += host.nbytes
        return guarded(host)

    def pinned(self, words: int) -> NDArray[np.int32]:
        self.allocations += 1
        return np.full(words, -1, np.int32)

    def copy_in(self, to: NDArray[np.int32], staged: NDArray[np.int32]) -> None:
        def copy() -> None:
            to[: len(staged)] = staged
            to[len(staged) :] = -1  # what an earlier step left behind is not to be read

        self.stream.append(copy)

    def copy_out(self, to: NDArray[np.int32], array: NDArray[np.int32]) -> None:
        self.wait()
        to[...] = array[: len(to)]

    def function(self, stem: str, name: str, shared: int) -> Callable[..., None]:
        assert self.recording is None, "a kernel is loaded while a graph is captured"
        if stem not in self.modules:
            self.modules[stem] = open_module(stem)
        function = self.modules[stem].get_function(name)
        function.max_dynamic_shared_size_bytes = max(shared, 48 << 10)

        def launch(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
            assert self.is_active, "a kernel is started outside `active`"

            def start() -> None:
                function(grid, block, arguments, shared_mem=shared_mem)

            if self.recording is not None:
                self.recording.append(start)
                return
            self.launched.append(name)
            self.stream.append(start)

        return launch

    def capture(self, launches: Callable[[], None]) -> Graph:
        self.recording = []
        launches()
        graph, self.recording = Graph(self, tuple(self.recording)), None
        return graph

    def mark(self, index: int) -> None:
        assert 0 <= index < 4

    def seconds(self, begin: int, end: int) -> float:
        return float(end - begin)

    def memory(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def close(self) -> None:
        self.closed = True


@frozen
class Graph:
    """Launches with the arrays and numbers they had when they were recorded: as a CUDA graph keeps them."""

    device: ShimDevice
    launches: tuple[Callable[[], None], ...]

    def launch(self) -> None:
        self.device.replays += 1
        self.device.stream += self.launches
