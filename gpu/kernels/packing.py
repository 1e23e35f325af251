"""Matrices brought into tiles, once per model: a mapped file that all processes share."""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from attrs import asdict, frozen
from numpy.typing import NDArray

from gpu.errors import ModelError
from gpu.kernels import WeightSource, simd
from gpu.kernels.jit import ISA
from gpu.kernels.tiles import COLUMNS, FLOAT_BYTES, FORMATS, ROWS, Format
from gpu.quants import Quantized, dequantize, unpack

Bytes = NDArray[np.uint8]
_MAGIC = b"ANTITILE"
_VERSION = 1
_SLAB = 4096
"""Rows that are brought into tiles at once: what bounds the memory this takes."""
_ALIGNMENT = 64


@frozen
class Packed:
    """One tensor in tiles. `start` is where in the file."""

    kind: str
    """Of the tiles: a key of `tiles.FORMATS` or of `tiles.FLOAT_BYTES`."""
    rows: int
    columns: int
    start: int
    tile_bytes: int

    @property
    def tiles(self) -> int:
        """How many there are; the last may be padded with zeros."""
        return -(-self.rows // ROWS)


def pack_rows(kind: str, raw: Bytes, columns: int) -> tuple[str, Bytes]:
    """Rows as they lie in a file to tiles: the tiles' kind, and (tiles, bytes of a tile)."""
    if kind in FLOAT_BYTES:
        return _pack_floats(kind, raw, columns)
    return kind, _pack_quantized(FORMATS[kind], unpack(kind, raw, columns))


def _pack_floats(kind: str, raw: Bytes, columns: int) -> tuple[str, Bytes]:
    if kind == "F16" and ISA == "portable":
        kind, raw = "F32", dequantize(kind, raw, (-1,)).view(np.uint8)
    size = FLOAT_BYTES[kind]
    element = np.dtype(f"u{size}")
    rows = _padded(raw.view(element).reshape(-1, columns))
    tiles = np.ascontiguousarray(rows.reshape(-1, ROWS, columns).transpose(0, 2, 1))
    return kind, tiles.reshape(len(tiles), -1).view(np.uint8)


def _padded(rows: NDArray[Any]) -> NDArray[Any]:
    return np.pad(rows, ((0, -len(rows) % ROWS), *((0, 0),) * (rows.ndim - 1)))


def _pack_quantized(form: Format, weights: Quantized) -> Bytes:
    q = _padded(weights.q)
    tiles, blocks = len(q) // ROWS, q.shape[1] // COLUMNS
    if form.bits == 4:
        steps = q.reshape(tiles, ROWS, blocks, 4, 2, 4).transpose(4, 0, 2, 3, 1, 5)
        values = steps[0] | steps[1] << 4
    else:
        values = q.reshape(tiles, ROWS, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    parts = [values.reshape(tiles, blocks, -1), _pack_scales(form, weights.scale, blocks)]
    if form.offset is None:
        parts.append(_pack_scales(form, weights.minimum, blocks))
    return np.concatenate(parts, axis=2).reshape(tiles, -1)


def _pack_scales(form: Format, scales: NDArray[np.float32], blocks: int) -> Bytes:
    kept = np.float32 if form.scale_bytes == 4 else np.float16
    grouped = _padded(scales).reshape(-1, ROWS, blocks, COLUMNS // form.group).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(grouped.astype(kept)).reshape(len(grouped), blocks, -1).view(np.uint8)


class TileFile:
    """Every matrix of a model in tiles.

    Mapped read-only: processes that open the same file share its pages.
    """

    def __init__(self, data: mmap.mmap, index: dict[str, Packed]) -> None:
        self._data = data
        self.index = index
        self.address = np.frombuffer(data, np.uint8).ctypes.data

    @classmethod
    def open(cls, path: Path) -> TileFile | None:
        """Map a finished file; None if it is not there, or not whole."""
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        size = int.from_bytes(data[-16:-8], "little") if len(data) >= 16 else 0
        if data[-8:] != _MAGIC or size > len(data) - 16:
            return None
        entries = json.loads(data[-16 - size : -16])
        return cls(data, {name: Packed(**entry) for name, entry in entries.items()})


def load_tiles(
    source: WeightSource, names: list[str], path: Path | None, progress: Callable[[int, int], None]
) -> TileFile:
    """The tiles of the matrices `names`, made now if `path` does not hold them yet.

    Without a `path`, or where it cannot be written, they go to an unnamed temporary file. `progress` gets
    (bytes read, bytes in all). Raises `ModelError` for a tensor that cannot be run.
    """
    total = sum(source.raw(name)[2].nbytes for name in names)
    found = TileFile.open(path) if path else None
    if found is None:
        found = _make(source, names, path, lambda done: progress(done, total))
    progress(total, total)
    return found


def _make(
    source: WeightSource, names: list[str], path: Path | None, progress: Callable[[int], None]
) -> TileFile:
    try:
        return _make_named(source, names, path, progress) if path else _make_unnamed(source, names, progress)
    except OSError:
        return _make_unnamed(source, names, progress)


def _make_named(
    source: WeightSource, names: list[str], path: Path, progress: Callable[[int], None]
) -> TileFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
        try:
            _write(file, source, names, progress)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    made = TileFile.open(path)
    if made is None:
        raise OSError(f"{path} vanished while it was made")
    return made


def _make_unnamed(source: WeightSource, names: list[str], progress: Callable[[int], None]) -> TileFile:
    with tempfile.TemporaryFile() as file:
        index = _write(file, source, names, progress)
        return TileFile(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), index)


def _write(
    file: IO[bytes], source: WeightSource, names: list[str], progress: Callable[[int], None]
) -> dict[str, Packed]:
    index = {}
    done = 0
    for name in names:
        kind, shape, raw = source.raw(name)
        index[name] = _write_tensor(file, name, kind, shape, _in_halves(source, name, raw))
        done += source.raw(name)[2].nbytes
        progress(done)
    text = json.dumps({name: asdict(packed) for name, packed in index.items()}).encode()
    file.write(text + len(text).to_bytes(8, "little") + _MAGIC)
    file.flush()
    return index


def _in_halves(source: WeightSource, name: str, raw: Bytes) -> Bytes:
    """Queries and keys whose pairs lie side by side, with each head's first elements before its second ones.

    Both sides of the product are permuted alike, so scores stay as they are, and there is one way to rotate.
    """
    if source.config.rope_pairs != "interleaved" or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return raw
    rows = source.raw(name)[1][0]
    return raw.reshape(-1, source.config.head_dim // 2, 2, raw.nbytes // rows).swapaxes(1, 2).reshape(-1)


def _write_tensor(file: IO[bytes], name: str, kind: str, shape: tuple[int, ...], raw: Bytes) -> Packed:
    if len(shape) != 2 or shape[1] % COLUMNS:
        raise ModelError(
            f"tensor {name!r} of shape {shape}: rows of a multiple of {COLUMNS} weights are needed"
        )
    rows, columns = shape
    per_row = raw.nbytes // rows
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    start, tile_bytes = file.tell(), 0
    for first in range(0, rows, _SLAB):
        slab = raw[first * per_row : (first + _SLAB) * per_row]
        tiles_kind, tiles = pack_rows(kind, slab, columns)
        tile_bytes = tiles.shape[1]
        file.write(tiles.data)
    return Packed(tiles_kind, rows, columns, start, tile_bytes)


def tile_file_name(path: Path) -> str:
    """A name that changes with the model's contents, as far as its files' headers, sizes and times tell."""
    digest = hashlib.sha256(f"{_VERSION} {ISA} {simd.HALF_BYTES}".encode())
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(1 << 16))
    return f"{digest.hexdigest()[:32]}.tiles"
