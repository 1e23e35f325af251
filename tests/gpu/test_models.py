"""Each family, from each kind of file, says what the fp32 reference says; and what is not supported is named."""

import json

import numpy as np
import pytest
import tiny_models
from driving import ask, greedy, load
from reference import llama_3_1, reference_logprobs
from safetensors import safe_open
from safetensors.numpy import load_file

from gpu.errors import ModelError
from gpu.model_card import read_model_card
from gpu.model_config import RopeScaling
from gpu.rope import rope_frequencies
from gpu.tokenizer import load_tokenizer
from gpu.weights import open_weights

PROMPT = tuple(range(60, 110))


def _agrees(path, tolerance=5e-3):
    """Of five tokens at each place: a tiny model is so sure of the likeliest that it says little."""
    engine = load(path)
    reply = ask(engine, PROMPT, greedy(6, logprobs=5))
    engine.close()
    _, source = open_weights(path)
    expected = reference_logprobs(source, [*PROMPT, *reply.tokens])[len(PROMPT) - 1 : -1]
    for token, detail, row in zip(reply.tokens, reply.logprobs, expected, strict=True):
        assert row[token] >= row.max() - tolerance
        tokens, chances = zip(*detail.top, strict=True)
        np.testing.assert_allclose(chances, row[list(tokens)], atol=tolerance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_a_llama_in_each_tensor_type(tmp_path, kind):
    weights = tiny_models.random_weights(1, tied=False)
    _agrees(tiny_models.write_gguf(tmp_path / "m.gguf", weights, kind))


def test_a_llama_in_the_usual_mixture_of_k_quants(tmp_path):
    weights = tiny_models.random_weights(2, tied=False)
    kinds = {
        name: "Q6_K"
        for name in weights
        if name.endswith(("attn_v.weight", "ffn_down.weight", "output.weight"))
    }
    kinds |= {f"blk.{layer}.attn_output.weight": "Q8_0" for layer in range(tiny_models.LAYERS)}
    kinds["token_embd.weight"] = "Q6_K"
    _agrees(tiny_models.write_gguf(tmp_path / "m.gguf", weights, "Q4_K", kinds=kinds))


def test_a_qwen2_has_biases_and_a_qwen3_norms_its_heads(tmp_path):
    biased = tiny_models.random_weights(3, bias=True)
    _agrees(tiny_models.write_gguf(tmp_path / "2.gguf", biased, "Q8_0", arch="qwen2"))
    normed = tiny_models.random_weights(4, head_norms=True)
    _agrees(tiny_models.write_gguf(tmp_path / "3.gguf", normed, "Q8_0", arch="qwen3"))


def _with_heads(weights, heads, kv_heads, head_dim):
    """The same model but for its attention, of which only the shape is right."""
    rows = {"attn_q": heads * head_dim, "attn_k": kv_heads * head_dim, "attn_v": kv_heads * head_dim}
    shapes = {part: (count, tiny_models.WIDTH) for part, count in rows.items()}
    shapes["attn_output"] = (tiny_models.WIDTH, heads * head_dim)
    parts = {name: name.removesuffix(".weight").rsplit(".", 1)[-1] for name in weights}
    return {
        name: np.zeros(shapes[part], np.float32) if (part := parts[name]) in shapes else array
        for name, array in weights.items()
    }


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Of so short a context, and by so much, that a prompt of fifty tokens shows it: pair 0 is kept, 1 to 3 are blended."""
ROPE_FORMS = {
    "older": {"rope_theta": 5000.0, "rope_scaling": SHORT},
    "newer": {"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, **SHORT}},
    "both": {"rope_theta": 5000.0, "rope_scaling": SHORT, "rope_parameters": {"rope_theta": 5000.0, **SHORT}},
}


def test_a_llama_3_gguf_has_its_stretching_in_a_tensor(tmp_path):
    weights = tiny_models.random_weights(5)
    weights["rope_freqs.weight"] = np.linspace(1, 8, tiny_models.HEAD_DIM // 2, dtype=np.float32)
    _agrees(tiny_models.write_gguf(tmp_path / "m.gguf", weights, "Q8_0"))


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_a_llama_3_directory_has_its_stretching_in_either_form_of_the_configuration(tmp_path, form):
    path = tiny_models.write_safetensors(
        tmp_path / "dir", tiny_models.random_weights(5), config=ROPE_FORMS[form]
    )
    config = read_model_card(path).config
    assert (config.rope_base, config.rope_scaling) == (5000.0, RopeScaling(32.0, 1.0, 4.0, 32))
    _agrees(path)


def test_the_newer_form_without_a_stretching_has_its_own_base(tmp_path):
    rope = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    path = tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(5), config=rope)
    config = read_model_card(path).config
    assert (config.rope_base, config.rope_scaling) == (1e6, None)


def test_llama_3_1_s_own_numbers_keep_29_pairs_and_divide_29(tmp_path):
    """128 elements, base 500 000: wavelengths up to 8192 / 4 stay, those above 8192 are eight times as long."""
    weights = _with_heads(tiny_models.random_weights(), 2, 1, 128)
    heads = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_theta": 5e5, "rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 8192}}
    path = tiny_models.write_safetensors(tmp_path / "dir", weights, config=heads | rope)
    frequencies, plain = rope_frequencies(open_weights(path)[1]), 5e5 ** (-np.arange(64) / 64)
    slowed = plain / frequencies
    np.testing.assert_allclose(slowed[:29], 1)
    np.testing.assert_allclose(slowed[35:], 8)
    assert (np.diff(slowed[28:36]) > 0).all()
    np.testing.assert_allclose(frequencies, llama_3_1(plain, 8, 1, 4, 8192), rtol=1e-12)


def test_a_gguf_s_tensor_and_the_configuration_it_was_converted_from_turn_alike(tmp_path):
    """The converter writes what each frequency is divided by."""
    weights = tiny_models.random_weights(5)
    directory = tiny_models.write_safetensors(tmp_path / "dir", weights, config={"rope_scaling": SHORT})
    plain = 10000.0 ** (-np.arange(16) / 16)
    divisors = (plain / llama_3_1(plain, 32, 1, 4, 32)).astype(np.float32)
    file = tiny_models.write_gguf(tmp_path / "m.gguf", {**weights, "rope_freqs.weight": divisors})
    one, two = (rope_frequencies(open_weights(path)[1]) for path in (directory, file))
    np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "traits"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"tied": False}),
        ("Qwen2ForCausalLM", {"bias": True}),
        ("Qwen3ForCausalLM", {"head_norms": True}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_each_family_from_shards(tmp_path, architecture, traits, dtype):
    weights = {name: array.astype(dtype) for name, array in tiny_models.random_weights(6, **traits).items()}
    path = tiny_models.write_safetensors(tmp_path / "dir", weights, architecture, shards=3)
    assert read_model_card(path).parameters == sum(array.size for array in weights.values())
    _agrees(path)


def test_a_directory_in_bf16(tmp_path):
    """Which NumPy has no type for, and most models are published in."""
    weights = tiny_models.random_weights(9, tied=False)
    path = tiny_models.write_safetensors(tmp_path / "dir", weights)
    for shard in path.glob("*.safetensors"):
        _rewrite_in_bf16(shard)
    assert read_model_card(path).quantization == "BF16"
    name = "blk.1.ffn_up.weight"
    read = open_weights(path)[1].floats(name)
    assert not np.array_equal(read, weights[name])
    np.testing.assert_allclose(read, weights[name], rtol=2**-7)
    _agrees(path)


def _rewrite_in_bf16(shard):
    header, body = {}, b""
    for name, array in load_file(shard).items():
        at, body = len(body), body + (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": (at, len(body))}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + body)
    with safe_open(shard, "np") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}  # noqa: SIM118 - no mapping


def test_both_files_of_one_model_speak_alike(tmp_path):
    """GGUF keeps a llama's rotating pairs side by side, safetensors half a head apart."""
    weights = tiny_models.random_weights(7)
    directory = tiny_models.write_safetensors(tmp_path / "dir", weights)
    apart = dict(weights)
    for name in weights:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = weights[name].reshape(-1, 2, tiny_models.HEAD_DIM // 2, tiny_models.WIDTH)
            apart[name] = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weights[name].shape)
    replies = []
    for path in (directory, tiny_models.write_gguf(tmp_path / "m.gguf", apart)):
        engine = load(path)
        replies.append(ask(engine, PROMPT, greedy(10, logprobs=0)))
        engine.close()
    assert replies[0] == replies[1]


def test_a_missing_shard_is_named(tmp_path):
    path = tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(8))
    next(path.glob("*00002*")).unlink()
    with pytest.raises(ModelError, match="lacks the tensor"):
        load(path)


def test_a_shard_cut_short_is_named(tmp_path):
    path = tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(8))
    shard = next(path.glob("*00002*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut short"):
        load(path)


def test_an_unsupported_architecture_is_named_in_either_file(tmp_path):
    weights = tiny_models.random_weights()
    with pytest.raises(ModelError, match="'gemma3'"):
        read_model_card(tiny_models.write_gguf(tmp_path / "m.gguf", weights, arch="gemma3"))
    path = tiny_models.write_safetensors(tmp_path / "dir", weights, "MixtralForCausalLM")
    with pytest.raises(ModelError, match="'MixtralForCausalLM'"):
        read_model_card(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_an_unsupported_setting_is_named(tmp_path, changes, words):
    path = tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(), config=changes)
    with pytest.raises(ModelError, match=words):
        read_model_card(path)


def test_a_sliding_window_bounds_the_context(tmp_path):
    path = tiny_models.write_safetensors(
        tmp_path / "d", tiny_models.random_weights(), config={"sliding_window": 128}
    )
    assert read_model_card(path).context_length == 128


def test_both_files_tokenize_alike(tmp_path):
    weights = tiny_models.random_weights()
    one = load_tokenizer(tiny_models.write_gguf(tmp_path / "m.gguf", weights))
    two = load_tokenizer(tiny_models.write_safetensors(tmp_path / "dir", weights))
    text = "Grüße, 世界 🙂\n<|im_end|>"
    for special in (False, True):
        assert one.encode(text, special=special) == two.encode(text, special=special)
    assert one.decode_bytes(one.encode(text)) == text.encode()
    assert one.eos_ids == two.eos_ids == (tiny_models.EOS,)
