"""The sampling parameters that both faces of a turn share, from JSON to `SamplingParams`."""

from __future__ import annotations

import secrets
from typing import Any

from attrs import frozen

from actors.edge.errors import shown
from actors.edge.validation import Fields
from gpu.sampling_params import SamplingParams

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_METADATA = 16
SMALLEST_TOP_P = 1e-6
"""What a `top_p` of 0 means: the likeliest token alone."""


@frozen
class ModelInfo:
    """A model as the edge must know it: what `/v1/models` says, and the bounds of its parameters."""

    name: str
    aliases: tuple[str, ...] = ()
    context_length: int = 2048
    vocab_size: int = 32000
    created: int = 0
    owned_by: str = "antiphon"


@frozen
class Extras:
    """Parameters beyond `SamplingParams` that sit beside them."""

    stop: tuple[str, ...]
    include_stop: bool
    fast_answers: str
    """"auto" | "off"."""
    is_default: bool
    """Nothing is asked of the sampling but a length: no seed, no stops, every parameter at its default."""


def take_sampling(
    fields: Fields, model: ModelInfo, *, max_tokens: int | None, logprobs: int
) -> tuple[SamplingParams, Extras]:
    """Take every sampling field. `max_tokens` None becomes 0: whatever fits the context.

    A missing seed is minted here and travels with the turn, so that a resumed reply is the same reply.
    """
    limit = max_tokens or model.context_length
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    temperature = fields.number("temperature", 0.0, 2.0)
    top_p = fields.number("top_p", 0.0, 1.0)
    params = SamplingParams(
        max_tokens=max_tokens or 0,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else max(top_p, SMALLEST_TOP_P),
        top_k=max(fields.integer("top_k", -1, model.vocab_size) or 0, 0),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=_repetition_penalty(fields),
        logit_bias=_logit_bias(fields, model),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        min_tokens=fields.integer("min_tokens", 0, limit) or 0,
        ignore_eos=fields.flag("ignore_eos") or False,
        stop_token_ids=fields.integers("stop_token_ids", 0, model.vocab_size - 1, MAX_STOP_TOKENS),
        logprobs=logprobs,
    )
    stop = _stops(fields)
    plain = SamplingParams(params.max_tokens, seed=params.seed)
    extras = Extras(
        stop=stop,
        include_stop=fields.flag("include_stop_str_in_output") or False,
        fast_answers=fields.choice("fast_answers", ("auto", "off")) or "auto",
        is_default=seed is None and not stop and params == plain,
    )
    return params, extras


def take_max_tokens(fields: Fields, field: str, model: ModelInfo) -> int | None:
    """Take a bound on the reply's length: from 1 to the model's context."""
    return fields.integer(field, 1, model.context_length)


def take_metadata(fields: Fields) -> tuple[tuple[str, str], ...]:
    """Take `metadata`: at most 16 pairs, keys to 64 and values to 512 characters."""
    pairs = fields.mapping("metadata") or {}
    if len(pairs) > MAX_METADATA:
        raise fields.refuse("metadata", f"must have at most {MAX_METADATA} pairs, not {len(pairs)}")
    for key, value in pairs.items():
        if not isinstance(value, str) or len(value) > 512 or len(key) > 64:
            raise fields.refuse("metadata", "must map keys of up to 64 to strings of up to 512 characters")
    return tuple(pairs.items())


def take_end_user(fields: Fields) -> tuple[str, ...]:
    """Take `safety_identifier` and `user`, its old name: labels of the end user, never an identity."""
    labels = (fields.text("safety_identifier", 512), fields.text("user", 512))
    return tuple(label for label in labels if label)


def take_service_fields(fields: Fields) -> str | None:
    """Take the fields that choose a kind of service: there is one. Returns the tier that was asked for."""
    tier = fields.choice("service_tier", ("auto", "default"))
    fields.unsupported("prompt_cache_retention", "in_memory")
    fields.unsupported("prompt_cache_options", {})
    fields.unsupported("moderation")
    return tier


def _repetition_penalty(fields: Fields) -> float:
    value = fields.number("repetition_penalty", 0.0, 10.0)
    if value is None:
        return 1.0
    if value <= 0.0:
        raise fields.refuse("repetition_penalty", "must be above 0 (1 changes nothing)")
    return value


def _logit_bias(fields: Fields, model: ModelInfo) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias") or {}
    if len(biases) > MAX_BIASES:
        raise fields.refuse("logit_bias", f"must have at most {MAX_BIASES} entries, not {len(biases)}")
    made = dict(_bias(fields, model, key, value) for key, value in biases.items())
    if len(made) != len(biases):
        raise fields.refuse("logit_bias", "names one token twice")
    return tuple(sorted(made.items()))


def _bias(fields: Fields, model: ModelInfo, key: str, value: Any) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < model.vocab_size):
        top = model.vocab_size - 1
        raise fields.refuse("logit_bias", f"keys must be token ids from 0 to {top}, not {shown(key)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise fields.refuse("logit_bias", f"values must be numbers from -100 to 100, not {shown(value)}")
    return int(key), float(value)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    items = [value] if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_STOPS:
        raise fields.refuse("stop", f"must be a string or an array of 1 to {MAX_STOPS} strings")
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_LENGTH:
            raise fields.refuse("stop", f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(items)
