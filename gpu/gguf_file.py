"""Read a GGUF file's header and map its tensors.

The `gguf` package's own reader makes a NumPy array for every string of the vocabulary, which takes seconds;
a server that must be ready again within two cannot wait for it. This reader walks the header once with
`struct`. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4

BLOCK_SHAPES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Tensor types this engine runs: weights in a block, bytes of a block."""

_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11:
    "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28:
    "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@frozen
class TensorEntry:
    """Where one tensor lies. `shape` is (rows, columns) or (columns,): the fastest axis last."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int
    """Bytes."""


@frozen
class GGUFFile:
    """A header, read; and the file, mapped read-only. `close` unmaps."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    header_bytes: int
    data: mmap.mmap

    def raw(self, name: str) -> memoryview:
        """The bytes of tensor `name`, not copied."""
        entry = self.tensors[name]
        return memoryview(self.data)[entry.start : entry.start + entry.size]

    def close(self) -> None:
        """Unmap the file. Views that are still held keep it mapped."""
        self.data.close()


def open_gguf(path: Path) -> GGUFFile:
    """Map `path` and read its header; weights are not touched. Raises `ModelError`."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read ({error}); give a GGUF file or a safetensors directory"
        ) from error
    try:
        return _parse(path, data)
    except (struct.error, LookupError, ArithmeticError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: the GGUF header is damaged; fetch the file again") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it begins with {data[:4]!r})")
    version, tensor_count, field_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}; versions 2 and 3 are read")
    cursor = _Cursor(data, 24)
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(field_count)}
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _entry(name, type_id, shape, base + offset) for name, shape, type_id, offset in infos}
    end = max((entry.start + entry.size for entry in tensors.values()), default=0)
    if end > len(data):
        raise ModelError(
            f"{path}: cut short: {len(data)} bytes, its header promises {end}; fetch the file again"
        )
    return GGUFFile(path, metadata, tensors, base, data)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"tensor {name!r} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _entry(name: str, type_id: int, shape: tuple[int, ...], start: int) -> TensorEntry:
    kind = _TYPE_NAMES.get(type_id, f"#{type_id}")
    weights, size = BLOCK_SHAPES.get(kind, (1, 0))
    count = 1
    for extent in shape:
        count *= extent
    return TensorEntry(name, kind, shape, start, count // weights * size)


class _Cursor:
    """Walks the header; every read moves `at` on."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        if self.at + length > len(self.data):
            raise IndexError(length)
        text = self.data[self.at : self.at + length].decode()
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data):
            raise IndexError(count)
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return list(values)

    def strings(self, count: int) -> list[str]:
        """The vocabulary's path: 10⁵ strings, so names are local and nothing is checked twice."""
        data, at, out, length_of = self.data, self.at, [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            out.append(data[start:at].decode())
        self.at = at
        return out
