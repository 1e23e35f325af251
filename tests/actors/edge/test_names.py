"""A message's name is in the prompt, or the request is refused: never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.prompt import FileModelText
from actors.protocol import ChatMessage
from gpu.errors import BadRequest
from tests.gpu.tiny_models import random_weights, write_gguf

NAMES_OF_USERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if m.name and m.role == 'user' %} ({{ m.name | upper | trim }}){% endif %}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
NO_NAMES = "{% for m in messages %}{% if m.name %}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def text_with(tmp_path: Path, template: str) -> FileModelText:
    return FileModelText.load(write_gguf(tmp_path / "tiny.gguf", random_weights(), template=template))


def test_a_name_is_written_into_the_prompt_by_a_template_that_reads_it(tmp_path: Path) -> None:
    text = text_with(tmp_path, NAMES_OF_USERS)
    prompt = text.encode([ChatMessage("user", "hi", "Ann"), ChatMessage("assistant", "yes")])
    assert b"user (ANN)hi" in b"".join(map(text.token_bytes, prompt))


@pytest.mark.parametrize(("template", "param"), [(NAMES_OF_USERS, 2), (NO_NAMES, 0)])
def test_a_name_that_the_template_would_ignore_is_refused(tmp_path: Path, template: str, param: int) -> None:
    text = text_with(tmp_path, template)
    messages = [
        ChatMessage("user", "hi", "Ann"),
        ChatMessage("user", "Ann", ""),
        ChatMessage("assistant", "Bob and Ann", "Bob"),
    ]
    with pytest.raises(BadRequest) as caught:
        text.encode(messages)
    assert caught.value.param == f"messages[{param}].name"
