"""Small random models in real files: enough layers to be wrong in, few enough weights to be quick."""

from __future__ import annotations

import json

import gguf
import numpy as np
from safetensors.numpy import save_file

WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 512, 6, 2, 32, 2
SPECIALS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 512
_QUANTIZED = {
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_K": gguf.GGMLQuantizationType.Q4_K,
    "Q6_K": gguf.GGMLQuantizationType.Q6_K,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "F32": gguf.GGMLQuantizationType.F32,
}


def vocabulary():
    """Byte-level: one token a byte, then the control tokens. 258 ids, not a multiple of sixteen."""
    from gpu.vocabulary import byte_alphabet

    by_byte = {byte: char for char, byte in byte_alphabet().items()}
    return [by_byte[byte] for byte in range(256)] + SPECIALS


VOCAB = 256 + len(SPECIALS)
EOS = VOCAB - 1


def random_weights(seed=0, *, bias=False, head_norms=False, tied=True):
    """GGUF name → fp32 array."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def gain(size):
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    weights = {"token_embd.weight": 4 * matrix(VOCAB, WIDTH), "output_norm.weight": gain(WIDTH)}
    if not tied:
        weights["output.weight"] = 3 * matrix(VOCAB, WIDTH)
    for layer in range(LAYERS):
        part = f"blk.{layer}."
        weights[part + "attn_norm.weight"] = gain(WIDTH)
        weights[part + "ffn_norm.weight"] = gain(WIDTH)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{part}attn_{name}.weight"] = matrix(heads * HEAD_DIM, WIDTH)
            if bias:
                weights[f"{part}attn_{name}.bias"] = matrix(1, heads * HEAD_DIM)[0]
        if head_norms:
            weights[part + "attn_q_norm.weight"] = gain(HEAD_DIM)
            weights[part + "attn_k_norm.weight"] = gain(HEAD_DIM)
        # The attention's output is as wide as 256 columns where the format's blocks want it.
        weights[part + "attn_output.weight"] = matrix(WIDTH, HEADS * HEAD_DIM)
        weights[part + "ffn_gate.weight"] = matrix(FEED_FORWARD, WIDTH)
        weights[part + "ffn_up.weight"] = matrix(FEED_FORWARD, WIDTH)
        weights[part + "ffn_down.weight"] = matrix(WIDTH, FEED_FORWARD)
    return weights


def random_blocks(kind, rows, columns, seed=0):
    """Valid random blocks of a tensor type, as bytes (rows, bytes of a row): also for types nobody quantises to."""
    from gpu.gguf_file import BLOCK_SHAPES

    rng = np.random.default_rng(seed)
    weights, size = BLOCK_SHAPES[kind]
    if weights == 1:
        values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        if kind == "F32":
            return values.view(np.uint8)
        if kind == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    largest = {"Q4_0": 8, "Q4_1": 15, "Q8_0": 127, "Q4_K": 15 * 63, "Q6_K": 32 * 127}[kind]
    scale = 1.5 / np.sqrt(columns) / largest
    at = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    for i, start in enumerate(at):
        values = scale * rng.uniform(0.5, 1, blocks.shape[:2])
        if i:
            values = values * (-7.5 if kind == "Q4_1" else 7.5)
        blocks[..., start : start + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path, weights, kind="F32", *, arch="llama", kinds=None, metadata=None, vocab=None, template=TEMPLATE
):
    """Write a GGUF: matrices as `kind` (or by name as `kinds` says), vectors in fp32."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab or vocabulary())
    writer.add_token_types([1] * 256 + [3] * len(SPECIALS))
    writer.add_token_merges([])
    writer.add_eos_token_id(EOS)
    if template:
        writer.add_chat_template(template)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    for i, (name, values) in enumerate(weights.items()):
        wanted = (kinds or {}).get(name, kind) if values.ndim == 2 else "F32"
        if wanted == "F32":
            writer.add_tensor(name, values)
            continue
        blocks = random_blocks(wanted, *values.shape, seed=i)
        writer.add_tensor(name, blocks, raw_dtype=_QUANTIZED[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_TO_HF = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _hf_name(name):
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_TO_HF[part]}.{suffix}"


def write_safetensors(path, weights, architecture="LlamaForCausalLM", *, shards=2, config=None):
    """Write a model directory: config.json, tokenizer.json and `shards` files."""
    path.mkdir()
    names = list(weights)
    for shard in range(shards):
        part = {_hf_name(name): weights[name] for name in names[shard::shards]}
        save_file(part, str(path / f"model-{shard + 1:05}-of-{shards:05}.safetensors"))
    settings = {
        "architectures": [architecture],
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": "output.weight" not in weights,
        "eos_token_id": EOS,
        **(config or {}),
    }
    (path / "config.json").write_text(json.dumps(settings))
    tokens = vocabulary()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + i, "content": text, "special": True, **flags}
            for i, text in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens[:256])}, "merges": [],
        },
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return path
