"""Each family, from each kind of file, says what the fp32 reference says; and what is not supported is named."""

import numpy as np
import pytest
import tiny_models
from driving import ask, greedy, load
from reference import reference_logprobs

from gpu.errors import ModelError
from gpu.model_card import read_model_card
from gpu.tokenizer import load_tokenizer
from gpu.weights import open_weights

PROMPT = tuple(range(60, 110))


def _agrees(path, tolerance=5e-3):
    engine = load(path)
    reply = ask(engine, PROMPT, greedy(6, logprobs=0))
    engine.close()
    _, source = open_weights(path)
    expected = reference_logprobs(source, [*PROMPT, *reply.tokens])[len(PROMPT) - 1 : -1]
    got = np.array([detail.logprob for detail in reply.logprobs])
    np.testing.assert_allclose(
        got, [row[token] for row, token in zip(expected, reply.tokens, strict=True)], atol=tolerance
    )
    assert all(row[token] >= row.max() - tolerance for row, token in zip(expected, reply.tokens, strict=True))


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


def test_llama_3_stretches_its_slow_rotations_in_either_file(tmp_path):
    weights = tiny_models.random_weights(5)
    weights["rope_freqs.weight"] = np.linspace(1, 8, tiny_models.HEAD_DIM // 2, dtype=np.float32)
    _agrees(tiny_models.write_gguf(tmp_path / "m.gguf", weights, "Q8_0"))
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"rope_scaling": {**scaling, "original_max_position_embeddings": 64}}
    _agrees(tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(5), config=config))


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
