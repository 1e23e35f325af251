"""What the decoder does not run is refused by name, from a real file, before either engine reads a weight."""

import json

import numpy as np
import pytest
import tiny_models
from driving import ask, greedy, load
from plain_kernels import PlainKernels
from safetensors.numpy import save_file

from gpu.engine_on_gpu import load_engine_on_gpu
from gpu.errors import ModelError
from gpu.llama import Llama
from gpu.model_card import read_model_card
from gpu.tensor_shapes import tensor_shapes
from gpu.weights import open_weights

WIDTH, HEAD_DIM, VOCAB = tiny_models.WIDTH, tiny_models.HEAD_DIM, tiny_models.VOCAB
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _on_gpu(path):
    """Refused before anything is asked of the card."""
    return load_engine_on_gpu(path, object())


@pytest.fixture(params=[load, _on_gpu], ids=["cpu", "cuda"])
def loader(request):
    return request.param


def _directory(tmp_path, config=None, architecture="LlamaForCausalLM", **traits):
    weights = tiny_models.random_weights(**traits)
    return tiny_models.write_safetensors(tmp_path / "dir", weights, architecture, config=config)


def _gguf(tmp_path, metadata=None, **more):
    return tiny_models.write_gguf(
        tmp_path / "m.gguf", tiny_models.random_weights(), metadata=metadata, **more
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"hidden_activation": "relu2"}, "hidden_activation 'relu2'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0, and 500000.0"),
        ({"rope_parameters": LLAMA_3, "rope_scaling": {**LLAMA_3, "factor": 32.0}}, "different things"),
        ({"rope_parameters": LLAMA_3}, "lacks 'original_max_position_embeddings'"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"head_dim": 31}, "heads of 31"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": "512"}, "intermediate_size is '512'"),
        ({"vocab_size": 258.5}, "vocab_size is 258.5"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_setting_of_a_directory_is_named(tmp_path, changes, words):
    path = _directory(tmp_path, changes)
    with pytest.raises(ModelError, match=words):
        read_model_card(path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_biases_on_attention_are_refused_where_they_are_not_the_family_s(tmp_path, architecture):
    with pytest.raises(ModelError, match=f"attention_bias on a {architecture}"):
        read_model_card(_directory(tmp_path, {"attention_bias": True}, architecture))


def test_settings_that_change_nothing_are_taken(tmp_path):
    same = {"hidden_act": "silu", "hidden_activation": None, "mlp_bias": False, "partial_rotary_factor": 1.0}
    rope = {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000, "type": "default"}}
    card = read_model_card(_directory(tmp_path, {**same, **rope, "attention_bias": False}))
    assert card.config.rope_base == 10000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count 16 is not supported; supported: 32"),
        ({"llama.attention.value_length": 64}, "llama.attention.value_length 64"),
        ({"llama.rope.scaling.factor": 4}, "rope scaling 'linear'"),
        ({"llama.rope.scale_linear": 4}, "rope scaling 'linear'"),
        ({"llama.rope.scaling.attn_factor": 2}, "attn_factor 2"),
        ({"llama.attention.head_count_kv": 4}, "6 query heads cannot share 4"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.expert_count": 8}, "experts"),
    ],
)
def test_a_field_of_a_gguf_is_named(tmp_path, changes, words):
    path = _gguf(tmp_path, changes)
    with pytest.raises(ModelError, match=words):
        read_model_card(path)


def test_a_gguf_s_scaling_is_named(tmp_path):
    path = _gguf(tmp_path, template="yarn")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.chat_template", b"llama.rope.scaling.type"))
    with pytest.raises(ModelError, match="rope scaling 'yarn' is not supported"):
        read_model_card(path)


def test_a_gguf_s_fields_that_change_nothing_are_taken(tmp_path):
    same = {
        "llama.rope.dimension_count": 32,
        "llama.rope.scaling.factor": 1,
        "llama.attention.sliding_window": 0,
    }
    assert read_model_card(_gguf(tmp_path, same)).context_length == tiny_models.CONTEXT


def test_a_sliding_window_bounds_the_context_of_a_gguf(tmp_path):
    assert read_model_card(_gguf(tmp_path, {"llama.attention.sliding_window": 128})).context_length == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"intermediate_size": 480},
            r"mlp.gate_proj.weight' has the shape \(512, 256\).* it is \(480, 256\)",
        ),
        ({"head_dim": 64}, r"q_proj.weight' has the shape \(192, 256\).* it is \(384, 256\)"),
        ({"num_attention_heads": 4}, r"q_proj.weight' has the shape \(192, 256\).* it is \(128, 256\)"),
        ({"num_key_value_heads": 3}, r"k_proj.weight' has the shape \(64, 256\).* it is \(96, 256\)"),
        ({"vocab_size": 4096}, r"embed_tokens.weight' has the shape \(258, 256\).* it is \(4096, 256\)"),
        ({"hidden_size": 512}, r"embed_tokens.weight' has the shape \(258, 256\).* it is \(258, 512\)"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2"),
        (
            {"num_hidden_layers": 1},
            "'model.layers.1.input_layernorm.weight' is not supported, nor are 8 more",
        ),
    ],
)
def test_a_configuration_of_another_model_is_refused(tmp_path, loader, changes, words):
    with pytest.raises(ModelError, match=words):
        loader(_directory(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_length": 480}, r"ffn_gate.weight' has the shape \(512, 256\).* it is \(480, 256\)"),
        ({"attention.key_length": 64, "attention.value_length": 64}, r"attn_q.weight'.* it is \(384, 256\)"),
        ({"attention.head_count": 4}, r"attn_q.weight' has the shape \(192, 256\).* it is \(128, 256\)"),
        ({"attention.head_count_kv": 3}, r"attn_k.weight' has the shape \(64, 256\).* it is \(96, 256\)"),
        ({"embedding_length": 512}, r"token_embd.weight' has the shape \(258, 256\).* it is \(258, 512\)"),
        ({"block_count": 3}, "lacks the tensor 'blk.2"),
        ({"block_count": 1}, "'blk.1.attn_k.weight' is not supported, nor are 8 more"),
    ],
)
def test_a_header_of_another_model_is_refused(tmp_path, loader, changes, words):
    path = _gguf(tmp_path, {f"llama.{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=words):
        loader(path)


def test_more_words_than_embeddings_are_refused(tmp_path, loader):
    path = _gguf(tmp_path, vocab=[*tiny_models.vocabulary(), "more"])
    with pytest.raises(
        ModelError, match=r"token_embd.weight' has the shape \(258, 256\).* it is \(259, 256\)"
    ):
        loader(path)


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight", "blk.1.ffn_norm.weight"])
@pytest.mark.parametrize("write", [tiny_models.write_gguf, tiny_models.write_safetensors])
def test_a_norm_of_another_length_is_refused(tmp_path, loader, write, name):
    weights = {**tiny_models.random_weights(), name: np.ones(WIDTH - 1, np.float32)}
    with pytest.raises(ModelError, match=r"norm.weight' has the shape \(255,\).* it is \(256,\)"):
        loader(write(tmp_path / "model", weights))


def test_a_rope_tensor_of_another_length_is_refused(tmp_path, loader):
    weights = {**tiny_models.random_weights(), "rope_freqs.weight": np.ones(HEAD_DIM, np.float32)}
    with pytest.raises(ModelError, match=r"rope_freqs.weight' has the shape \(32,\).* it is \(16,\)"):
        loader(tiny_models.write_gguf(tmp_path / "m.gguf", weights))


@pytest.mark.parametrize(
    ("name", "in_a_directory"),
    [
        ("blk.0.attn_output.bias", "model.layers.0.self_attn.o_proj.bias"),
        ("blk.1.ffn_down.bias", "model.layers.1.mlp.down_proj.bias"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_tensor_nobody_uses_is_refused(tmp_path, loader, name, in_a_directory):
    weights = {**tiny_models.random_weights(), name: np.ones(WIDTH, np.float32)}
    with pytest.raises(ModelError, match=f"{name!r} is not supported"):
        loader(tiny_models.write_gguf(tmp_path / "m.gguf", weights))
    with pytest.raises(ModelError, match=f"{in_a_directory!r} is not supported"):
        loader(tiny_models.write_safetensors(tmp_path / "dir", weights))


@pytest.mark.parametrize(
    ("arch", "architecture", "part"),
    [("qwen2", "Qwen2ForCausalLM", "bias"), ("qwen3", "Qwen3ForCausalLM", "norm")],
)
def test_a_family_s_own_tensors_are_missed(tmp_path, loader, arch, architecture, part):
    weights = tiny_models.random_weights()
    with pytest.raises(ModelError, match=f"lacks the tensor 'blk.0.attn_q.*{part}"):
        loader(tiny_models.write_gguf(tmp_path / "m.gguf", weights, arch=arch))
    with pytest.raises(ModelError, match=f"lacks the tensor 'model.layers.0.self_attn.q.*{part}"):
        loader(tiny_models.write_safetensors(tmp_path / "dir", weights, architecture))


def test_a_tensor_whose_bytes_are_not_those_of_its_shape_is_refused(tmp_path, loader):
    path = _directory(tmp_path)
    shard = min(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))
    with pytest.raises(ModelError, match="bytes; damaged"):
        loader(path)


def _reply(path):
    engine = load(path)
    reply = ask(engine, tuple(range(60, 90)), greedy(4, logprobs=0))
    engine.close()
    return reply


def test_rotary_tables_and_a_second_copy_of_the_embedding_change_nothing(tmp_path):
    path = _directory(tmp_path)
    plain = _reply(path)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    extra = {name.format(layer): np.ones(16, np.float32) for layer in range(tiny_models.LAYERS)}
    extra["lm_head.weight"] = tiny_models.random_weights()["token_embd.weight"]
    save_file(extra, path / "more.safetensors")
    assert _reply(path) == plain


def test_a_head_that_is_said_to_be_the_embedding_and_is_not_is_refused(tmp_path, loader):
    path = _directory(tmp_path)
    save_file({"lm_head.weight": np.zeros((VOCAB, WIDTH), np.float32)}, path / "more.safetensors")
    with pytest.raises(ModelError, match=r"tie_word_embeddings says that 'lm_head.weight' is the embedding"):
        loader(path)


def test_only_the_shards_of_the_index_are_read(tmp_path):
    """Some directories hold the weights once more, in their makers' own layout."""
    path = _directory(tmp_path)
    shards = {shard.name: shard.name for shard in path.glob("*.safetensors")}
    save_file(
        {"layers.0.attention.wq.weight": np.zeros((4, 4), np.float32)}, path / "consolidated.safetensors"
    )
    with pytest.raises(ModelError, match=r"layers\.0\.attention\.wq\.weight"):
        open_weights(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    card, _ = open_weights(path)
    assert card.parameters == sum(array.size for array in tiny_models.random_weights().values())
    index.write_text(json.dumps({"weight_map": {**shards, "x": "model-00009.safetensors"}}))
    with pytest.raises(ModelError, match="model-00009"):
        open_weights(path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not an index"):
        open_weights(path)


def test_a_model_in_one_file_is_read_from_that_file_alone(tmp_path):
    path = tiny_models.write_safetensors(tmp_path / "dir", tiny_models.random_weights(), shards=1)
    next(path.glob("*.safetensors")).rename(path / "model.safetensors")
    save_file(
        {"layers.0.attention.wq.weight": np.zeros((4, 4), np.float32)}, path / "consolidated.safetensors"
    )
    open_weights(path)


class _Asked:
    """A source that remembers what was asked of it."""

    def __init__(self, source):
        self.source, self.config, self.has, self.names = source, source.config, source.has, set()

    def floats(self, name):
        self.names.add(name)
        return self.source.floats(name)


@pytest.mark.parametrize(
    ("arch", "traits", "more"),
    [
        ("llama", {}, {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}),
        ("llama", {"tied": False}, {}),
        ("qwen2", {"bias": True}, {}),
        ("qwen3", {"head_norms": True}, {}),
    ],
)
def test_what_is_checked_is_what_the_decoder_reads(tmp_path, arch, traits, more):
    weights = tiny_models.random_weights(**traits) | more
    _, source = open_weights(tiny_models.write_gguf(tmp_path / "m.gguf", weights, arch=arch))
    asked = _Asked(source)
    Llama(asked, PlainKernels(asked, 8))
    assert asked.names == set(tensor_shapes(source.config, source.has)) == set(weights)
