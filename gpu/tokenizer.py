"""Text to token ids and back: one face over GGUF vocabularies and `tokenizer.json`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.errors import BadRequest, ModelError
from gpu.gguf_file import open_gguf
from gpu.model_card import gguf_eos_ids, hf_config, hf_eos_ids
from gpu.vocabulary import Vocabulary, vocabulary_from_gguf, vocabulary_from_json

_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Never assigned, never in well-formed text: one that a message lacks breaks its look-alike control
tokens."""


@frozen(slots=False)
class Tokenizer:
    """Encodes and decodes. Pure: safe to share between threads."""

    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    add_bos: bool = False

    @property
    def n_vocab(self) -> int:
        """How many ids there are: valid ids are 0 ≤ id < n_vocab."""
        return len(self.vocabulary.pieces)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. No BOS is added.

        With `special`, control tokens spelled out in the text become themselves; without it they are plain
        characters. Text that is not Unicode (a lone surrogate) raises `BadRequest`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest("text", f"not valid Unicode at character {error.start}") from error
        return self._encode_split(text, self._any_added if special else self._plain_added)

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The reply's bytes: control tokens leave nothing, a character may be cut at either end."""
        control = self.vocabulary.control
        return b"".join(self.token_bytes(token) for token in token_ids if token not in control)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; for a control token, of its spelling. Out of range raises `IndexError`."""
        if token < 0:
            raise IndexError(token)
        return self.vocabulary.pieces[token]

    def encode_chat(self, rendered: str, sentinel: str) -> list[int]:
        """Ids of a rendered template in which `sentinel` marks the user's look-alikes of control tokens.

        Control tokens are recognised first, in the template's own text alone; then the marks are taken out.
        """
        ids: list[int] = []
        for piece, added in _split(rendered, self._any_added):
            ids += (
                [added]
                if added is not None
                else self._encode_split(piece.replace(sentinel, ""), self._plain_added)
            )
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def disarm(self, text: str, sentinel: str) -> str:
        """`text` with `sentinel` inside every spelling of a control token: none is recognised then."""
        for spelling in self._control_spellings:
            if spelling in text:
                text = text.replace(spelling, spelling[0] + sentinel + spelling[1:])
        return text

    def _encode_split(self, text: str, added: _Added) -> list[int]:
        ids: list[int] = []
        for piece, token in _split(text, added):
            if token is not None:
                ids.append(token)
            elif piece:
                ids += self.vocabulary.model.encode(piece, add_special_tokens=False).ids
        return ids

    @cached_property
    def _control_spellings(self) -> list[str]:
        return [text for text, token in self.vocabulary.added.items() if token in self.vocabulary.control]

    @cached_property
    def _any_added(self) -> _Added:
        return _Added.of(self.vocabulary.added)

    @cached_property
    def _plain_added(self) -> _Added:
        control = self.vocabulary.control
        return _Added.of(
            {text: token for text, token in self.vocabulary.added.items() if token not in control}
        )


@frozen
class _Added:
    """Whole-string tokens that are found before anything else, the longest first."""

    ids: dict[str, int]
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, ids: dict[str, int]) -> _Added:
        spellings = sorted(ids, key=len, reverse=True)
        return cls(ids, re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None)


def _split(text: str, added: _Added) -> Iterable[tuple[str, int | None]]:
    if added.pattern is None:
        return [(text, None)]
    return [(piece, added.ids[piece] if i % 2 else None) for i, piece in enumerate(added.pattern.split(text))]


def unused_noncharacter(texts: Iterable[str]) -> str:
    """A character that is in none of `texts`. Raises `BadRequest` if somebody used all thirty-two."""
    seen = set().union(*(set(text) for text in texts))
    for candidate in _NONCHARACTERS:
        if candidate not in seen:
            return candidate
    raise BadRequest(
        "messages", "the text uses every Unicode noncharacter from U+FDD0 to U+FDEF; leave one out"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file or of a model directory.

    An unknown kind is refused by name: `ModelError`.
    """
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    file = open_gguf(path)
    try:
        return tokenizer_from_metadata(file.metadata)
    finally:
        file.close()


def tokenizer_from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer in an already read GGUF header."""
    model = metadata.get("tokenizer.ggml.model")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return Tokenizer(
        vocabulary_from_gguf(metadata),
        eos_ids=gguf_eos_ids(metadata),
        bos_id=None if bos is None else int(bos),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama")),
    )


def _from_directory(path: Path) -> Tokenizer:
    try:
        description = json.loads((path / "tokenizer.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: no readable tokenizer.json ({error}); only the `tokenizers` format is read"
        ) from error
    settings = path / "tokenizer_config.json"
    options = json.loads(settings.read_text()) if settings.exists() else {}
    config = hf_config(path)
    vocabulary = vocabulary_from_json(description, int(config["vocab_size"]))
    bos_text = options.get("bos_token")
    bos_text = bos_text.get("content") if isinstance(bos_text, dict) else bos_text
    bos = vocabulary.added.get(bos_text) if bos_text else None
    return Tokenizer(vocabulary, hf_eos_ids(path, config), bos, bool(options.get("add_bos_token", False)))


class Detokenizer:
    """Tokens in, whole characters out: never half of one, whatever the tokens are cut at."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; bytes of an unfinished character wait for the next push."""
        return self._decoder.decode(self._tokenizer.decode_bytes(tokens))

    def finish(self) -> str:
        """End of the reply: an unfinished character is dropped, so there is never more text."""
        self._decoder.reset()
        return ""


__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer", "tokenizer_from_metadata", "unused_noncharacter"]
