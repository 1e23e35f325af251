"""Vocabularies as files give them, in one form: a merge model, ids' bytes, added tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import frozen
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from gpu.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.replace("NUMBER", "{1,3}"), _WORDS.replace("NUMBER", "")
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""`tokenizer.ggml.pre` → the regular expressions that cut text before merging, applied one after another."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "tekken")
"""These vocabularies hold words that their merges do not reach."""


@frozen
class Vocabulary:
    """`model` merges plain text; `pieces[id]` is an id's bytes; `added` are matched as whole strings."""

    model: Tokenizer
    pieces: list[bytes]
    added: dict[str, int]
    control: frozenset[int]


def vocabulary_from_gguf(metadata: dict[str, Any]) -> Vocabulary:
    """Build from `tokenizer.ggml.*`. An unknown model or pre-tokenizer is refused by name: `ModelError`."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        model, pieces = _byte_level(metadata, tokens), _byte_level_pieces(tokens)
    elif kind == "llama":
        model, pieces = _sentencepiece(metadata, tokens, kinds), _sentencepiece_pieces(tokens, kinds)
    else:
        raise ModelError(
            f"tokenizer {kind!r} is not supported; supported: 'gpt2' (byte-level BPE), 'llama' (SPM)"
        )
    control = frozenset(i for i, k in enumerate(kinds) if k in (_CONTROL, _UNKNOWN))
    added = {tokens[i]: i for i, k in enumerate(kinds) if k in (_CONTROL, _USER_DEFINED) and tokens[i]}
    for token in added.values():
        pieces[token] = tokens[token].encode()
    return Vocabulary(model, pieces, added, control)


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in SPLITS:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(SPLITS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return model


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ModelError("tokenizer 'llama' without tokenizer.ggml.scores is not supported")
    vocab = {token: i for i, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocab[token]], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    pairs = [(left, right) for *_, left, right in merges]
    model = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    model.normalizer = normalizers.Sequence(steps)
    return model


def vocabulary_from_json(description: dict[str, Any], size: int) -> Vocabulary:
    """Build from a `tokenizer.json`; `size` pads the ids to the model's.

    Other than BPE is refused: `ModelError`.
    """
    kind = description.get("model", {}).get("type")
    if kind != "BPE":
        raise ModelError(f"tokenizer {kind!r} is not supported; supported: 'BPE'")
    listed = description.get("added_tokens", [])
    tokens = [""] * max(size, *(entry["id"] + 1 for entry in listed), len(description["model"]["vocab"]))
    for text, token in description["model"]["vocab"].items():
        tokens[token] = text
    plain = {**description, "added_tokens": [], "post_processor": None}
    model = Tokenizer.from_str(json.dumps(plain))
    if description["model"].get("byte_fallback"):
        kinds = [_BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", text) else _NORMAL for text in tokens]
        pieces = _sentencepiece_pieces(tokens, kinds)
    else:
        pieces = _byte_level_pieces(tokens)
    for entry in listed:
        pieces[entry["id"]] = entry["content"].encode()
    added = {entry["content"]: entry["id"] for entry in listed}
    return Vocabulary(model, pieces, added, frozenset(entry["id"] for entry in listed if entry["special"]))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_pieces(tokens: list[str]) -> list[bytes]:
    # Latin-1 can carry any byte, so one C-level translate does what a loop over characters would.
    table = str.maketrans({char: chr(byte) for char, byte in byte_alphabet().items()})
    out = []
    for token in tokens:
        text = token.translate(table)
        out.append(text.encode("latin-1") if max(text, default="") <= "\xff" else token.encode())
    return out


def _sentencepiece_pieces(tokens: list[str], kinds: list[int]) -> list[bytes]:
    return [
        bytes([int(token[3:5], 16)]) if kind == _BYTE else token.replace(_SPACE, " ").encode()
        for token, kind in zip(tokens, kinds, strict=True)
    ]
