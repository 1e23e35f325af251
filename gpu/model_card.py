"""What a model file says of itself, without touching its weights: cheap enough for every actor to ask."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.errors import ModelError
from gpu.gguf_file import BLOCK_SHAPES, GGUFFile, open_gguf
from gpu.model_config import ModelConfig, config_from_gguf, config_from_hf


@frozen
class ModelCard:
    """A model's facts. `file_bytes` is the size of its weights' files on disk."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    parameters: int
    file_bytes: int
    quantization: str
    """The tensor type most weights have: `Q4_1`, `BF16`, …"""
    config: ModelConfig


def read_model_card(path: str | Path) -> ModelCard:
    """Read the card of a GGUF file or of a safetensors directory. Raises `ModelError`."""
    path = Path(path)
    if path.is_dir():
        return card_of_directory(path)
    file = open_gguf(path)
    try:
        return card_of_gguf(file)
    finally:
        file.close()


def gguf_eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a reply: the header's eos, eot and eom."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [int(metadata[f"tokenizer.ggml.{key}"]) for key in keys if f"tokenizer.ggml.{key}" in metadata]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ends = ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>")
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    found += [i for i, kind in enumerate(kinds) if kind == 3 and tokens[i] in ends]
    return tuple(sorted(set(found)))


def card_of_gguf(file: GGUFFile) -> ModelCard:
    """The card of an already opened GGUF file. Raises `ModelError` naming what is not supported."""
    vocab = len(file.metadata.get("tokenizer.ggml.tokens", []))
    config = config_from_gguf(file.metadata, set(file.tensors), vocab)
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        if entry.type not in BLOCK_SHAPES:
            raise ModelError(
                f"{file.path}: tensor {entry.name!r} has type {entry.type}; run: {', '.join(BLOCK_SHAPES)}"
            )
        weights, size = BLOCK_SHAPES[entry.type]
        sizes[entry.type] = sizes.get(entry.type, 0) + entry.size // size * weights
    return ModelCard(
        name=str(file.metadata.get("general.name") or file.path.stem),
        architecture=config.architecture,
        context_length=config.context_length,
        vocab_size=vocab,
        eos_ids=gguf_eos_ids(file.metadata),
        parameters=sum(sizes.values()),
        file_bytes=len(file.data),
        quantization=max(sizes, key=lambda kind: sizes[kind]),
        config=config,
    )


def safetensors_header(path: Path) -> dict[str, Any]:
    """Name → {dtype, shape, data_offsets} of one shard. Raises `ModelError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ModelError(f"{path}: cut short; fetch the file again")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise ModelError(f"{path}: not a safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return header


def hf_config(path: Path) -> dict[str, Any]:
    """The directory's `config.json`. Raises `ModelError`."""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: no readable config.json ({error}); give a model directory or a GGUF file"
        ) from error
    return config


def hf_eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a reply: `generation_config.json` first, then `config.json`."""
    generation = path / "generation_config.json"
    found = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    if found is None:
        found = config.get("eos_token_id", [])
    return tuple(sorted(found)) if isinstance(found, list) else (int(found),)


def shard_paths(path: Path) -> list[Path]:
    """The safetensors shards of a directory, in order of name. Raises `ModelError` when there are none.

    `model.safetensors`, else those the index names, else all: a directory may hold the weights in another
    layout besides.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return [path / name for name in sorted(set(_weight_map(index).values()))]
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{path}: no .safetensors file in it")
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → the shard it is in."""
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{index}: not an index of safetensors ({error}); fetch the file again") from error
    return found


def card_of_directory(path: Path) -> ModelCard:
    """The card of a directory of safetensors. Raises `ModelError` naming what is not supported."""
    raw = hf_config(path)
    config = config_from_hf(raw)
    counts: dict[str, int] = {}
    for shard in shard_paths(path):
        for entry in safetensors_header(shard).values():
            size = 1
            for extent in entry["shape"]:
                size *= extent
            counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + size
    return ModelCard(
        name=str(raw.get("_name_or_path") or path.resolve().name),
        architecture=config.architecture,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_ids=hf_eos_ids(path, raw),
        parameters=sum(counts.values()),
        file_bytes=sum(shard.stat().st_size for shard in shard_paths(path)),
        quantization=max(counts, key=lambda kind: counts[kind]),
        config=config,
    )
