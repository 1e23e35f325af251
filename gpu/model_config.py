"""The shape of a model: what the decoder must know of it, read from a GGUF header or a `config.json`."""

from __future__ import annotations

import math
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
_SWISH = ("silu", "swish")
"""One function under its two names."""
_HF_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": _SWISH,
    "hidden_activation": _SWISH,
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}
"""What a `config.json` may say of these, if it speaks of them at all."""
_BIASED = ("Qwen2ForCausalLM",)
"""These have biases on queries, keys and values whatever `attention_bias` says."""


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
    heads = _whole(metadata, f"{arch}.attention.head_count")
    width = _whole(metadata, f"{arch}.embedding_length")
    context = _whole(metadata, f"{arch}.context_length")
    head_dim = _whole(metadata, f"{arch}.attention.key_length", width // heads)
    _only(metadata, f"{arch}.attention.value_length", (head_dim,))
    _only(metadata, f"{arch}.rope.dimension_count", (head_dim,))
    _refuse_gguf_scaling(metadata, arch)
    return _shared_out(
        ModelConfig(
            architecture=arch,
            layers=_whole(metadata, f"{arch}.block_count"),
            width=width,
            feed_forward=_whole(metadata, f"{arch}.feed_forward_length"),
            heads=heads,
            kv_heads=_whole(metadata, f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_length=min(context, _window(metadata, f"{arch}.attention.sliding_window", context)),
            norm_eps=_number(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_base=_number(metadata, f"{arch}.rope.freq_base", 10000.0),
            rope_pairs="interleaved" if arch == "llama" else "halves",
            tied_embeddings="output.weight" not in tensor_names,
        )
    )


def _refuse_gguf_scaling(metadata: Mapping[str, Any], arch: str) -> None:
    """Llama 3's scaling is in a tensor; any other is in these fields. A factor without a type is a linear one."""
    _only(metadata, f"{arch}.rope.scaling.attn_factor", (1.0,))
    scaling = metadata.get(f"{arch}.rope.scaling.type")
    factors = [metadata.get(f"{arch}.rope.{key}") for key in ("scaling.factor", "scale_linear")]
    if scaling is None and any(factor not in (None, 0, 1) for factor in factors):
        scaling = "linear"
    if scaling not in (None, "none", ""):
        raise ModelError(
            f"rope scaling {scaling!r} is not supported; supported: none, or llama 3's rope_freqs tensor"
        )


def _number(header: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero. What the header leaves out, or null, is `default`; without one: `ModelError`."""
    value = header.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"the model's header lacks {key!r}; the file is damaged or not a language model")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{key} is {value!r} in the model's header; a number above zero is needed")
    return float(value)


def _whole(header: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _number(header, key, default)
    if value != int(value):
        raise ModelError(f"{key} is {value} in the model's header; a whole number is needed")
    return int(value)


def _window(header: Mapping[str, Any], key: str, context: int) -> int:
    """Within its sliding window a model attends to everything, as the decoder does: it bounds the context."""
    return _whole(header, key, context) if header.get(key) else context


def _only(header: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    value = header.get(key)
    if value is not None and value not in allowed:
        raise ModelError(f"{key} {value!r} is not supported; supported: {', '.join(map(str, allowed))}")


def _shared_out(config: ModelConfig) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise ModelError(f"{config.heads} query heads cannot share {config.kv_heads} key heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"heads of {config.head_dim}: rotation takes elements in pairs, so an even number")
    return config


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The shape a Hugging Face `config.json` tells. Refuses by name: `ModelError`."""
    names = config.get("architectures") or ["?"]
    if names[0] not in HF_ARCHITECTURES:
        raise ModelError(
            f"architecture {names[0]!r} is not supported; supported: {', '.join(HF_ARCHITECTURES)}"
        )
    _refuse_hf_settings(config, names[0])
    heads, width = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    context = _whole(config, "max_position_embeddings")
    slides = config.get("use_sliding_window", True)
    base, scaling = _rope(config)
    return _shared_out(
        ModelConfig(
            architecture=HF_ARCHITECTURES[names[0]],
            layers=_whole(config, "num_hidden_layers"),
            width=width,
            feed_forward=_whole(config, "intermediate_size"),
            heads=heads,
            kv_heads=_whole(config, "num_key_value_heads", heads),
            head_dim=_whole(config, "head_dim", width // heads),
            vocab_size=_whole(config, "vocab_size"),
            context_length=min(context, _window(config, "sliding_window", context) if slides else context),
            norm_eps=_number(config, "rms_norm_eps"),
            rope_base=base,
            rope_pairs="halves",
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    )


def _refuse_hf_settings(config: Mapping[str, Any], architecture: str) -> None:
    if config.get("quantization_config"):
        raise ModelError(
            "a safetensors model with quantization_config is not supported; give the plain one or a GGUF"
        )
    if config.get("attention_bias") and architecture not in _BIASED:
        raise ModelError(f"attention_bias on a {architecture} is not supported")
    for key, allowed in _HF_ONLY.items():
        _only(config, key, allowed)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and stretching: from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    newer, older = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    rope = newer or older
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"rope_parameters of their own for {', '.join(rope)} are not supported")
    if newer and older and newer != {**newer, **older}:
        raise ModelError("rope_parameters and rope_scaling say different things; keep the right one")
    _only(rope, "partial_rotary_factor", (1.0,))
    base = _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0))
    if config.get("rope_theta") not in (None, base):
        raise ModelError(
            f"rope_theta is {config['rope_theta']}, and {base} beside the scaling; keep the right one"
        )
    return base, _rope_scaling(rope, "rope_parameters" if newer else "rope_scaling")


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{where} {kind!r} is not supported; supported: default, llama3")
    return RopeScaling(
        _number(rope, "factor"),
        _number(rope, "low_freq_factor"),
        _number(rope, "high_freq_factor"),
        _whole(rope, "original_max_position_embeddings"),
    )
