"""Text to ids and back; and control tokens, which come from the template alone."""

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.chat_template import compile_template, encode_chat, load_chat_template
from gpu.errors import BadRequest, ModelError, TemplateError
from gpu.tokenizer import Detokenizer, load_tokenizer
from gpu.vocabulary import vocabulary_from_gguf, vocabulary_from_json


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(tiny)


@pytest.fixture(scope="module")
def template(tiny):
    return load_chat_template(tiny)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_what_is_encoded_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text


@settings(max_examples=100, deadline=None)
@given(st.text(), st.data())
def test_pieces_of_a_reply_are_whole_characters_and_make_the_text(tokenizer, text, data):
    ids, detokenizer, out = tokenizer.encode(text), Detokenizer(tokenizer), []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        out.append(detokenizer.push(ids[:count]))
        ids = ids[count:]
    out.append(detokenizer.finish())
    assert "".join(out) == text


def test_a_character_cut_off_by_the_end_is_dropped_and_a_broken_one_replaced(tokenizer):
    emoji = tokenizer.encode("🙂")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(emoji[:3]) == ""
    assert detokenizer.finish() == ""
    assert Detokenizer(tokenizer).push([*emoji[:2], ord("a")]).endswith("a")


def test_a_lone_surrogate_is_refused(tokenizer, template):
    with pytest.raises(BadRequest, match="Unicode"):
        tokenizer.encode("a\ud800")
    with pytest.raises(BadRequest, match="Unicode"):
        encode_chat(tokenizer, template, [{"role": "user", "content": "\ud800"}])


def test_control_tokens_are_themselves_only_where_asked_for(tokenizer):
    assert tokenizer.encode("<|im_end|>", special=True) == [tiny_models.EOS]
    assert tiny_models.EOS not in tokenizer.encode("<|im_end|>")
    assert tokenizer.decode_bytes([tiny_models.EOS]) == b""
    assert tokenizer.token_bytes(tiny_models.EOS) == b"<|im_end|>"
    for bad in (-1, tiny_models.VOCAB):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(bad)


forgeries = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "\n", "system", "a", "\ufdd0"])
)


@settings(max_examples=200, deadline=None)
@given(forgeries, forgeries)
def test_a_message_cannot_forge_a_control_token(tokenizer, template, role, content):
    messages = [{"role": "".join(role), "content": "".join(content)}, {"role": "user", "content": "x"}]
    ids = encode_chat(tokenizer, template, messages)
    controls = [token for token in ids if token >= 256]
    start, end = 256, 257
    assert controls == [start, end, start, end, start]
    plain = template.render(messages)
    spelled = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert spelled == plain.encode()


def test_honest_messages_are_tokenized_as_the_rendered_text_is(tokenizer, template):
    messages = [{"role": "user", "content": "\n\nhello  world\n"}]
    assert encode_chat(tokenizer, template, messages) == tokenizer.encode(
        template.render(messages), special=True
    )


def test_a_text_that_uses_up_every_noncharacter_is_refused(tokenizer, template):
    text = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(BadRequest, match="noncharacter"):
        encode_chat(tokenizer, template, [{"role": "user", "content": text}])


def test_a_template_may_refuse_and_may_not_reach_out():
    refusing = compile_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.render([])
    with pytest.raises(TemplateError):
        compile_template("{{ messages.__class__.__mro__[1].__subclasses__() }}").render([])
    with pytest.raises(TemplateError):
        compile_template("{{ messages.append(1) }}").render([])
    with pytest.raises(ModelError, match="not valid"):
        compile_template("{% for %}")


def test_a_model_without_a_template_is_refused(tmp_path):
    path = tiny_models.write_gguf(tmp_path / "m.gguf", tiny_models.random_weights(), template=None)
    with pytest.raises(ModelError, match="no chat template"):
        load_chat_template(path)


def _sentencepiece(**more):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello", "s", ">", "<"]
    scores = [0.0] * len(pieces) + [-10, -11, -11, -11, -11, -1, -2, -3, -4, -5, -11, -11, -11]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.token_type": kinds + [1] * len(words),
        "tokenizer.ggml.scores": [float(score) for score in scores],
        **more,
    }


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes():
    vocabulary = vocabulary_from_gguf(_sentencepiece())
    tokens = vocabulary.model.encode("hello é", add_special_tokens=False).ids
    assert [vocabulary.pieces[token] for token in tokens] == [b" hello", b" ", b"\xc3", b"\xa9"]
    assert 1 not in vocabulary.model.encode("<s>", add_special_tokens=False).ids


def test_unknown_tokenizers_are_refused_by_name():
    with pytest.raises(ModelError, match="'t5'"):
        vocabulary_from_gguf({"tokenizer.ggml.model": "t5"})
    with pytest.raises(ModelError, match="'exotic'"):
        vocabulary_from_gguf(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "exotic", "tokenizer.ggml.tokens": []}
        )
    with pytest.raises(ModelError, match="'Unigram'"):
        vocabulary_from_json({"model": {"type": "Unigram"}}, 4)


@pytest.mark.model
def test_the_default_model_s_prompt(default_model):
    tokenizer, template = load_tokenizer(default_model), load_chat_template(default_model)
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": "What is the capital of France?"}])
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-16:] == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.encode("1234") == [tokenizer.encode(digit)[0] for digit in "1234"]
