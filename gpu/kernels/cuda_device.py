"""What is under the CUDA kernels: arrays, a stream, modules, graphs. CuPy on a card; NumPy in the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.errors import GpuFailed, GpuFull, ModelError
from gpu.kernels.cubin import build

Array = Any
"""Memory on the device, with a shape and a type; `array[i]` is a view."""
Function = Callable[..., None]
"""A kernel: `function(grid, block, arguments, shared_mem=bytes)`. Scalars are NumPy's: they have a width."""

STATIC_SHARED = 48 << 10
"""Bytes of shared memory a block gets without asking."""
_OUT_OF_MEMORY = 2
"""Both of CUDA's interfaces have this number for it."""


class Graph(Protocol):
    """Launches, recorded once."""

    def launch(self) -> None:
        """Replay them all."""
        ...


class Device(Protocol):
    """Everything runs in order on one stream; only `copy_out` waits."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What all the rest is called under, in whatever thread. Raises `GpuFull` and `GpuFailed` for what it does."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: type) -> Array:
        """Device memory, not cleared."""
        ...

    def upload(self, host: NDArray[Any]) -> Array:
        """A copy of `host` on the device."""
        ...

    def pinned(self, words: int) -> NDArray[np.int32]:
        """Host memory that copies go from and to without waiting."""
        ...

    def copy_in(self, to: Array, staged: NDArray[np.int32]) -> None:
        """Start copying `staged` to the front of `to`. It must stay as it is until the stream gets there."""
        ...

    def copy_out(self, to: NDArray[np.int32], array: Array) -> None:
        """Copy the front of `array` into `to` and wait for it, and so for everything before."""
        ...

    def function(self, stem: str, name: str, shared: int) -> Function:
        """A kernel of `<stem>.cu`, allowed to use `shared` bytes."""
        ...

    def capture(self, launches: Callable[[], None]) -> Graph:
        """Record what `launches` launches, without running it. Raises `GpuFull` where there is no memory for it."""
        ...

    def mark(self, index: int) -> None:
        """Note the time on the stream under a number from 0 to 3."""
        ...

    def seconds(self, begin: int, end: int) -> float:
        """Between two marks that were passed."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""
        ...

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        ...


class CupyDevice:
    """The card this process sees first; `CUDA_VISIBLE_DEVICES` (a UUID) says which that is.

    Cubins are built for exactly this card at the first start, which takes some 30 s, and kept in `cache`.
    Raises `ModelError` where there is no CuPy or the card is too old, `GpuFailed` where CUDA finds none or fails.
    """

    def __init__(self, cache: Path) -> None:
        self._cupy = _cupy()
        self._errors = (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        major, minor = (int(digit) for digit in _capability(self._cupy))
        if major < 8:
            raise ModelError(f"this GPU has compute capability {major}.{minor}; 8.0 or more is needed")
        self.architecture = f"sm_{major}{minor}"
        self._cache = cache
        self._device = self._cupy.cuda.Device(0)
        with self._telling(), self._device:
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._marks = [self._cupy.cuda.Event() for _ in range(4)]
        self._modules: dict[str, Any] = {}
        self._pinned: list[Any] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make the card and the stream this thread's."""
        with self._telling(), self._device, self._stream:
            yield

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """CUDA's errors as ours: short memory can be waited for, after anything else its context is of no use."""
        try:
            yield
        except self._errors as error:
            if error.status == _OUT_OF_MEMORY:
                raise GpuFull(f"the GPU's memory is full ({error})") from error
            raise GpuFailed(f"the GPU failed: {error}") from error

    def empty(self, shape: tuple[int, ...], dtype: type) -> Array:
        """From CuPy's pool. Raises `ModelError` when the card is full."""
        try:
            return self._cupy.empty(shape, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise ModelError(f"the GPU's memory is full ({error}); serve a smaller model") from error

    def upload(self, host: NDArray[Any]) -> Array:
        """Waits until it is there."""
        array = self.empty(host.shape, host.dtype.type)
        array.set(host)
        self._stream.synchronize()
        return array

    def pinned(self, words: int) -> NDArray[np.int32]:
        """Kept as long as the device."""
        memory = self._cupy.cuda.alloc_pinned_memory(words * 4)
        self._pinned.append(memory)
        return np.frombuffer(memory, np.int32, words)

    def copy_in(self, to: Array, staged: NDArray[np.int32]) -> None:
        """One asynchronous copy."""
        to[: len(staged)].set(staged, stream=self._stream)

    def copy_out(self, to: NDArray[np.int32], array: Array) -> None:
        """One copy, and the only place that waits for the card."""
        array[: len(to)].get(stream=self._stream, out=to)
        self._stream.synchronize()

    def function(self, stem: str, name: str, shared: int) -> Function:
        """From the cubin, which is built if need be."""
        if stem not in self._modules:
            self._modules[stem] = self._cupy.RawModule(path=str(build(stem, self.architecture, self._cache)))
        function = self._modules[stem].get_function(name)
        if shared > STATIC_SHARED:
            function.max_dynamic_shared_size_bytes = shared
        return function  # type: ignore[no-any-return]

    def capture(self, launches: Callable[[], None]) -> Graph:
        """A CUDA graph. Nothing in `launches` may allocate or wait."""
        with self._telling():
            self._stream.begin_capture()
            try:
                launches()
            finally:
                graph = self._stream.end_capture()
            graph.upload(self._stream)
        return graph  # type: ignore[no-any-return]

    def mark(self, index: int) -> None:
        """An event on the stream."""
        self._marks[index].record(self._stream)

    def seconds(self, begin: int, end: int) -> float:
        """By the card's own clock."""
        return float(self._cupy.cuda.get_elapsed_time(self._marks[begin], self._marks[end])) / 1e3

    def memory(self) -> tuple[int, int]:
        """What the driver says, and what the pool holds without using it."""
        free, total = self._device.mem_info
        return free + self._cupy.get_default_memory_pool().free_bytes(), total

    def close(self) -> None:
        """Empty the pools. A card that failed has nothing to give back."""
        self._modules.clear()
        self._pinned.clear()
        with contextlib.suppress(*self._errors), self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415 - never on a host without a GPU
    except ImportError as error:
        raise ModelError('CuPy is not installed: pip install "antiphon[gpu]"') from error
    return cupy


def _capability(cupy: Any) -> tuple[str, str]:
    """("9", "0")."""
    try:
        digits = str(cupy.cuda.Device(0).compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GpuFailed(f"CUDA finds no GPU it can use ({error})") from error
    return digits[:-1], digits[-1]
