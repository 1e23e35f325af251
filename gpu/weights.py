"""Where weights come from: a mapped GGUF file, or mapped safetensors shards under the same names."""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.errors import ModelError
from gpu.gguf_file import BLOCK_SHAPES, GGUFFile, open_gguf
from gpu.kernels import WeightSource
from gpu.model_card import (
    ModelCard,
    card_of_directory,
    card_of_gguf,
    hf_config,
    safetensors_header,
    shard_paths,
)
from gpu.model_config import ModelConfig, config_from_hf
from gpu.quants import FLOAT_TYPES, dequantize
from gpu.tensor_shapes import tensor_shapes

Bytes = NDArray[np.uint8]

_HF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HF_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def open_weights(path: str | Path) -> tuple[ModelCard, WeightSource]:
    """A model's card and its mapped weights, of which none are read yet: shapes are all right when this returns.

    Raises `ModelError` naming what is not supported, and the tensor that is not as the header promises.
    """
    path = Path(path)
    source: GGUFSource | SafetensorsSource
    if path.is_dir():
        card, source = card_of_directory(path), SafetensorsSource.open(path)
    else:
        file = open_gguf(path)
        card, source = card_of_gguf(file), GGUFSource(file)
    _check_tensors(source)
    return card, source


def _check_tensors(source: GGUFSource | SafetensorsSource) -> None:
    expected = tensor_shapes(source.config, source.has)
    for name, shape in expected.items():
        found = source.raw(name)[1]
        if found != shape:
            raise ModelError(
                f"tensor {source.own_name(name)!r} has the shape {found}, by the model's header it is {shape}: "
                "header and weights are not of one model"
            )
    if unused := sorted(source.names() - {source.own_name(name) for name in expected}):
        others = f", nor are {len(unused) - 1} more" if unused[1:] else ""
        raise ModelError(
            f"tensor {unused[0]!r} is not supported{others}: without it the model would say something else"
        )
    if source.config.tied_embeddings and source.has("output.weight"):
        _check_tied(source)


def _check_tied(source: GGUFSource | SafetensorsSource) -> None:
    """A file may hold the embedding a second time, as the head; it must then be the same."""
    (kind, _, data), (head_kind, _, head) = (
        source.raw(name) for name in ("token_embd.weight", "output.weight")
    )
    if kind != head_kind or not np.array_equal(data, head):
        raise ModelError(
            f"tie_word_embeddings says that {source.own_name('output.weight')!r} is the embedding; it is another"
        )


class GGUFSource:
    """The tensors of one GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config: ModelConfig = card_of_gguf(file).config

    def names(self) -> set[str]:
        """Of all tensors, as the file has them."""
        return set(self.file.tensors)

    @staticmethod
    def own_name(name: str) -> str:
        """What this kind of file calls a tensor."""
        return name

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self.file.tensors

    def raw(self, name: str) -> tuple[str, tuple[int, ...], Bytes]:
        """Type, shape and mapped bytes."""
        if name not in self.file.tensors:
            raise ModelError(
                f"the model lacks the tensor {name!r}; the file is damaged or of another architecture"
            )
        entry = self.file.tensors[name]
        return entry.type, entry.shape, np.frombuffer(self.file.raw(name), np.uint8)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The tensor in fp32."""
        kind, shape, data = self.raw(name)
        return dequantize(kind, data, shape)


@frozen
class SafetensorsSource:
    """The tensors of a directory's shards, found under GGUF's names."""

    config: ModelConfig
    entries: dict[str, tuple[Path, dict[str, Any]]]
    maps: dict[Path, tuple[mmap.mmap, int]]

    @classmethod
    def open(cls, path: Path) -> SafetensorsSource:
        """Map every shard. Raises `ModelError`."""
        entries: dict[str, tuple[Path, dict[str, Any]]] = {}
        maps = {}
        for shard in shard_paths(path):
            entries |= {name: (shard, entry) for name, entry in safetensors_header(shard).items()}
            with shard.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            maps[shard] = (data, 8 + int.from_bytes(data[:8], "little"))
        return cls(config_from_hf(hf_config(path)), entries, maps)

    def names(self) -> set[str]:
        """Of all tensors, as the shards have them. Old ones hold a table that follows from the configuration."""
        return {name for name in self.entries if not _ROTARY_TABLE.fullmatch(name)}

    @staticmethod
    def own_name(name: str) -> str:
        """What this kind of file calls a tensor."""
        if name in _HF_TOP:
            return _HF_TOP[name]
        _, _, rest = name.partition("blk.")
        index, _, part = rest.partition(".")
        stem, _, suffix = part.rpartition(".")
        return f"model.layers.{index}.{_HF_PARTS.get(stem, stem)}.{suffix}"

    def has(self, name: str) -> bool:
        """Whether a shard has this tensor."""
        return self.own_name(name) in self.entries

    def raw(self, name: str) -> tuple[str, tuple[int, ...], Bytes]:
        """Type, shape and mapped bytes."""
        hf_name = self.own_name(name)
        if hf_name not in self.entries:
            raise ModelError(
                f"the model lacks the tensor {hf_name!r}; a shard is missing or of another architecture"
            )
        shard, entry = self.entries[hf_name]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        if kind not in FLOAT_TYPES:
            raise ModelError(f"tensor {hf_name!r} has type {kind}; supported: {', '.join(FLOAT_TYPES)}")
        data, base = self.maps[shard]
        start, end = entry["data_offsets"]
        if start < 0 or end - start != math.prod(shape) * BLOCK_SHAPES[kind][1]:
            raise ModelError(
                f"{shard}: tensor {hf_name!r} of shape {shape} is given {end - start} bytes; damaged"
            )
        if base + end > len(data):
            raise ModelError(f"{shard}: cut short; fetch the file again")
        return kind, shape, np.frombuffer(data, np.uint8, end - start, base + start)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The tensor in fp32."""
        kind, shape, data = self.raw(name)
        return dequantize(kind, data, shape)
