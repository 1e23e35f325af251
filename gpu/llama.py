"""The Llama family's decoder, written once against the kernels' contract.

x = embed(token)
each layer:  x += wo · attention(rope(wq·n), rope(wk·n), wv·n)     n = rmsnorm(x)
             x += down · (silu(gate·n) * (up·n))                   n = rmsnorm(x)
logits = head · rmsnorm(x)
"""

from __future__ import annotations

from attrs import frozen

from gpu.kernels import Batch, Kernels, Matrix, Pending, StepResult, Vector, WeightSource


@frozen
class Layer:
    """One layer's weights."""

    attention_norm: Vector
    qkv: Matrix  # (heads + 2 * kv_heads) * head_dim rows
    qkv_bias: Vector | None
    head_norms: tuple[Vector, Vector] | None
    output: Matrix
    ffn_norm: Vector
    gate_up: Matrix  # 2 * feed_forward rows
    down: Matrix


class Llama:
    """Weights loaded into `kernels`, and the recorded forward pass over them."""

    def __init__(self, source: WeightSource, kernels: Kernels) -> None:
        self.config = config = source.config
        self.kernels = kernels
        self.embedding = kernels.matrix(("token_embd.weight",))
        self.layers = [self._load_layer(source, i) for i in range(config.layers)]
        self.final_norm = kernels.vector(("output_norm.weight",))
        self.head = self.embedding if config.tied_embeddings else kernels.matrix(("output.weight",))
        self.hidden = kernels.buffer(config.width)
        self.normed = kernels.buffer(config.width)
        self.delta = kernels.buffer(config.width)
        self.queries = kernels.buffer(config.heads * config.head_dim)
        self.attended = kernels.buffer(config.heads * config.head_dim)
        self.gated = kernels.buffer(config.feed_forward)
        self.program = kernels.record(self._forward)

    def _load_layer(self, source: WeightSource, index: int) -> Layer:
        def name(part: str) -> str:
            return f"blk.{index}.{part}"

        qkv = ("attn_q", "attn_k", "attn_v")
        biased = source.has(name("attn_q.bias"))
        normed = source.has(name("attn_q_norm.weight"))
        kernels = self.kernels
        return Layer(
            attention_norm=kernels.vector((name("attn_norm.weight"),)),
            qkv=kernels.matrix(tuple(name(f"{part}.weight") for part in qkv)),
            qkv_bias=kernels.vector(tuple(name(f"{part}.bias") for part in qkv)) if biased else None,
            head_norms=(
                (kernels.vector((name("attn_q_norm.weight"),)), kernels.vector((name("attn_k_norm.weight"),)))
                if normed
                else None
            ),
            output=kernels.matrix((name("attn_output.weight"),)),
            ffn_norm=kernels.vector((name("ffn_norm.weight"),)),
            gate_up=kernels.matrix((name("ffn_gate.weight"), name("ffn_up.weight"))),
            down=kernels.matrix((name("ffn_down.weight"),)),
        )

    def _forward(self) -> None:
        kernels = self.kernels
        kernels.embed(self.embedding, self.hidden)
        delta = None
        for index, layer in enumerate(self.layers):
            kernels.add_norm(self.hidden, delta, layer.attention_norm, self.normed)
            kernels.qkv(self.normed, layer.qkv, layer.qkv_bias, layer.head_norms, index, self.queries)
            kernels.attention(self.queries, index, self.attended)
            kernels.linear(self.attended, layer.output, self.delta)
            kernels.add_norm(self.hidden, self.delta, layer.ffn_norm, self.normed)
            kernels.swiglu(self.normed, layer.gate_up, self.gated)
            kernels.linear(self.gated, layer.down, self.delta)
            delta = self.delta
        kernels.add_norm(self.hidden, delta, self.final_norm, self.normed)
        kernels.logits(self.normed, self.head)

    def start(self, batch: Batch) -> Pending:
        """Begin to run every row of `batch` through the model, and to sample where it asks for it."""
        return self.kernels.start(self.program, batch)

    def finish(self, pending: Pending) -> StepResult:
        """What the step that `start` began brought back."""
        return self.kernels.finish(pending)

    def step(self, batch: Batch) -> StepResult:
        """`start`, then `finish`."""
        return self.finish(self.start(batch))
