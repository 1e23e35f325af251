"""Where weights come from: a mapped GGUF file, or mapped safetensors shards under the same names."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.errors import ModelError
from gpu.gguf_file import GGUFFile, open_gguf
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
from gpu.quants import dequantize

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


def open_weights(path: str | Path) -> tuple[ModelCard, WeightSource]:
    """A model's card and its mapped weights, of which none are read yet.

    Raises `ModelError` naming what is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return card_of_directory(path), SafetensorsSource.open(path)
    file = open_gguf(path)
    return card_of_gguf(file), GGUFSource(file)


class GGUFSource:
    """The tensors of one GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config: ModelConfig = card_of_gguf(file).config

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

    def has(self, name: str) -> bool:
        """Whether a shard has this tensor."""
        return _hf_name(name) in self.entries

    def raw(self, name: str) -> tuple[str, tuple[int, ...], Bytes]:
        """Type, shape and mapped bytes."""
        hf_name = _hf_name(name)
        if hf_name not in self.entries:
            raise ModelError(
                f"the model lacks the tensor {hf_name!r}; a shard is missing or of another architecture"
            )
        shard, entry = self.entries[hf_name]
        if entry["dtype"] not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {hf_name!r} has type {entry['dtype']}; supported: F32, F16, BF16")
        data, base = self.maps[shard]
        start, end = entry["data_offsets"]
        if base + end > len(data):
            raise ModelError(f"{shard}: cut short; fetch the file again")
        return entry["dtype"], tuple(entry["shape"]), np.frombuffer(data, np.uint8, end - start, base + start)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The tensor in fp32."""
        kind, shape, data = self.raw(name)
        return dequantize(kind, data, shape)


def _hf_name(name: str) -> str:
    if name in _HF_TOP:
        return _HF_TOP[name]
    _, _, rest = name.partition("blk.")
    index, _, part = rest.partition(".")
    stem, _, suffix = part.rpartition(".")
    return f"model.layers.{index}.{_HF_PARTS.get(stem, stem)}.{suffix}"
