"""The shape of a model: what the decoder must know of it, read from a GGUF header or a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from gpu.errors import ModelError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@frozen
class RopeScaling:
    """Llama 3's stretching of the slow rotations. All in the terms of its paper's code."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@frozen
class ModelConfig:
    """A Llama-family decoder. Widths are in elements."""

    architecture: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_base: float
    rope_pairs: Literal["interleaved", "halves"]
    """Which two elements of a head turn together: (2i, 2i+1), or (i, i + head_dim/2)."""
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: set[str], vocab_size: int) -> ModelConfig:
    """The shape a GGUF header tells. Refuses by name what the decoder does not run: `ModelError`."""
    arch = str(metadata.get("general.architecture", "?"))
    if arch not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"architecture {arch!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count", 0):
        raise ModelError(f"architecture {arch!r} with experts (mixture of experts) is not supported")
    heads, width = (
        int(_need(metadata, f"{arch}.attention.head_count")),
        int(_need(metadata, f"{arch}.embedding_length")),
    )
    context = int(_need(metadata, f"{arch}.context_length"))
    scaling = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    if scaling not in ("none", ""):
        raise ModelError(
            f"rope scaling {scaling!r} is not supported; supported: none, or llama 3's rope_freqs tensor"
        )
    head_dim = int(metadata.get(f"{arch}.attention.key_length", width // heads))
    _same_value_length(metadata, arch, head_dim)
    return ModelConfig(
        architecture=arch,
        layers=int(_need(metadata, f"{arch}.block_count")),
        width=width,
        feed_forward=int(_need(metadata, f"{arch}.feed_forward_length")),
        heads=heads,
        kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=min(context, int(metadata.get(f"{arch}.attention.sliding_window") or context)),
        norm_eps=float(_need(metadata, f"{arch}.attention.layer_norm_rms_epsilon")),
        rope_base=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_pairs="interleaved" if arch == "llama" else "halves",
        tied_embeddings="output.weight" not in tensor_names,
    )


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"the model's header lacks {key!r}; the file is damaged or not a language model")
    return metadata[key]


def _same_value_length(metadata: Mapping[str, Any], arch: str, head_dim: int) -> None:
    if int(metadata.get(f"{arch}.attention.value_length", head_dim)) != head_dim:
        raise ModelError("keys and values of different lengths are not supported")


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The shape a Hugging Face `config.json` tells. Refuses by name: `ModelError`."""
    names = config.get("architectures") or ["?"]
    if names[0] not in HF_ARCHITECTURES:
        raise ModelError(
            f"architecture {names[0]!r} is not supported; supported: {', '.join(HF_ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise ModelError(
            "a safetensors model with quantization_config is not supported; give the plain one or a GGUF"
        )
    if config.get("attention_bias") and names[0] in ("LlamaForCausalLM", "MistralForCausalLM"):
        raise ModelError("attention_bias on a Llama model is not supported")
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    context = int(config["max_position_embeddings"])
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return ModelConfig(
        architecture=HF_ARCHITECTURES[names[0]],
        layers=int(config["num_hidden_layers"]),
        width=width,
        feed_forward=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or width // heads),
        vocab_size=int(config["vocab_size"]),
        context_length=min(context, int(window or context)),
        norm_eps=float(config["rms_norm_eps"]),
        rope_base=float(config.get("rope_theta", 10000.0)),
        rope_pairs="halves",
        rope_scaling=_rope_scaling(config.get("rope_scaling")),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _rope_scaling(scaling: Mapping[str, Any] | None) -> RopeScaling | None:
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope_scaling {kind!r} is not supported; supported: llama3")
    return RopeScaling(
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )
