from __future__ import annotations

from pathlib import Path

import pytest

from actors.prompt import FileModelText
from actors.protocol import ChatMessage

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.model
@pytest.mark.skipif(not MODEL.exists(), reason="the default model is not here: run scripts/up --set-up-only")
def test_a_model_file_gives_prompts_text_and_its_context_length() -> None:
    text = FileModelText.load(MODEL)
    prompt = text.encode([ChatMessage("system", "be brief"), ChatMessage("user", "héllo")])
    assert prompt
    assert max(prompt) < text.n_vocab == 49152
    assert text.context_length == 8192
    tokens = text.tokenizer.encode("été 漢")
    assert text.detokenizer().push(tokens) == "été 漢"
    assert b"".join(map(text.token_bytes, tokens)).decode() == "été 漢"
