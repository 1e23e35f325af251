"""The model's own chat template, rendered in Jinja's sandbox, and turned into token ids nobody can forge."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from attrs import frozen
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpu.errors import ModelError, TemplateError
from gpu.gguf_file import open_gguf
from gpu.tokenizer import Tokenizer, unused_noncharacter


@frozen
class ChatTemplate:
    """A compiled template. Pure: safe to share between threads."""

    template: jinja2.Template
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt's text. A template that refuses these messages raises `TemplateError` with its words."""
        try:
            return self.template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of a conversation, ready for the reply.

    Control tokens come from the template alone: a message that spells one out is read as plain characters.
    Raises `TemplateError`, and `BadRequest` for text that is not Unicode.
    """
    sentinel = unused_noncharacter(_strings(messages))
    return tokenizer.encode_chat(template.render(_disarmed(messages, tokenizer, sentinel)), sentinel)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _disarmed(value: Any, tokenizer: Tokenizer, sentinel: str) -> Any:
    if isinstance(value, str):
        tokenizer.encode("" if value.isascii() else value)
        return tokenizer.disarm(value, sentinel)
    if isinstance(value, Mapping):
        return {key: _disarmed(item, tokenizer, sentinel) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_disarmed(item, tokenizer, sentinel) for item in value]
    return value


def load_chat_template(path: str | Path) -> ChatTemplate:
    """The template of a GGUF file or of a model directory. None there, or a broken one: `ModelError`."""
    path = Path(path)
    source, bos, eos = _from_directory(path) if path.is_dir() else _from_gguf(path)
    if not source:
        raise ModelError(f"{path}: the model has no chat template; use an instruction-tuned one")
    return compile_template(source, bos, eos)


def compile_template(source: str, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """Compile a template's source. Raises `ModelError` where it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return ChatTemplate(environment.from_string(source), bos_token, eos_token)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template is not valid: {error}") from error


def _raise_exception(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _from_gguf(path: Path) -> tuple[str, str, str]:
    file = open_gguf(path)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])

    def spelled(key: str) -> str:
        token = file.metadata.get(f"tokenizer.ggml.{key}")
        return str(tokens[token]) if token is not None and 0 <= token < len(tokens) else ""

    try:
        template = str(file.metadata.get("tokenizer.chat_template", ""))
        return template, spelled("bos_token_id"), spelled("eos_token_id")
    finally:
        file.close()


def _from_directory(path: Path) -> tuple[str, str, str]:
    settings = path / "tokenizer_config.json"
    options = json.loads(settings.read_text()) if settings.exists() else {}
    separate = path / "chat_template.jinja"
    template = separate.read_text() if separate.exists() else options.get("chat_template", "")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), "")

    def spelled(key: str) -> str:
        value = options.get(key) or ""
        return str(value["content"] if isinstance(value, dict) else value)

    return template, spelled("bos_token"), spelled("eos_token")
