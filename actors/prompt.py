"""A model as the session needs it: messages to prompt tokens, reply tokens to text. No weights."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from attrs import evolve, frozen

from actors.protocol import ChatMessage
from actors.turn_text import Detokenizer
from gpu import chat_template, tokenizer
from gpu.errors import BadRequest
from gpu.model_card import read_model_card

Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of change and size of each file."""


UNREAD_NAME = "this model's chat template does not read the names of such messages; leave it out"


class ModelText(Protocol):
    """What a turn needs to know of its model. Pure, so it may be called in a thread."""

    @property
    def context_length(self) -> int:
        """Prompt and reply together, in tokens."""

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt's tokens, ready for the reply.

        Raises `gpu.errors.TemplateError` or `gpu.errors.BadRequest` for messages the model cannot take.
        """

    def count(self, text: str) -> int:
        """Return how many tokens a text that is no prompt has."""

    def detokenizer(self) -> Detokenizer:
        """Return a fresh one, for one reply."""

    def token_bytes(self, token: int) -> bytes:
        """Return a token's own bytes."""


@frozen
class FileModelText:
    """The tokenizer, template and card of a model file or directory."""

    tokenizer: tokenizer.Tokenizer
    template: chat_template.ChatTemplate
    context_length: int

    @classmethod
    def load(cls, path: str | Path) -> FileModelText:
        """Read them. Raises `gpu.errors.ModelError`. Takes some tenths of a second: call it in a thread.

        As long as its files do not change, a model is read once in a process and those forked from it.
        """
        return _load(path, _stamp(Path(path)))

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""
        return self.tokenizer.n_vocab

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt's tokens."""
        if any(m.name for m in messages):
            self._check_names(messages)
        return chat_template.encode_chat(self.tokenizer, self.template, [_plain(m) for m in messages])

    def _check_names(self, messages: Sequence[ChatMessage]) -> None:
        """Refuse a name that the template does not write into the prompt: it would be ignored.

        The messages are rendered once with a mark for each name, and the marks looked for in the prompt.
        """
        draw = secrets.token_hex(8)  # no message has it
        marks = {index: f"name{draw}n{index}e" for index, m in enumerate(messages) if m.name}
        marked = [_plain(evolve(m, name=marks[index]) if m.name else m) for index, m in enumerate(messages)]
        prompt = self.template.render(marked).lower()
        for index, mark in marks.items():
            if mark not in prompt:
                raise BadRequest(f"messages[{index}].name", UNREAD_NAME)

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self.tokenizer.encode(text))

    def detokenizer(self) -> Detokenizer:
        """Return a fresh one, for one reply."""
        return tokenizer.Detokenizer(self.tokenizer)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's own bytes."""
        return self.tokenizer.token_bytes(token)


def _plain(message: ChatMessage) -> dict[str, str]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


@cache
def _load(path: str | Path, _stamp: Stamp) -> FileModelText:
    return FileModelText(
        tokenizer.load_tokenizer(path),
        chat_template.load_chat_template(path),
        read_model_card(path).context_length,
    )


def _stamp(path: Path) -> Stamp:
    """Return what changes when a model's files do. What is not there is the loader's to complain of."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    with suppress(OSError):
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return ()
