"""Running an engine to its end and keeping what came out."""

from __future__ import annotations

from attrs import define, field

from gpu.engine import Engine
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request


@define
class Reply:
    tokens: list = field(factory=list)
    logprobs: list = field(factory=list)
    finish: str = ""
    error: str = ""
    cached: int = 0


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **more})


def load(path, **more):
    return Engine.load(
        path, **{"kv_bytes": 4 << 20, "max_batch": 8, "token_budget": 64, "threads": 1, **more}
    )


def drain(engine, limit=10_000):
    """Step until nothing is left; id → Reply. Checks on the way that positions have no gap."""
    replies: dict[str, Reply] = {}
    for _ in range(limit):
        if not engine.has_work:
            return replies
        note(replies, engine.step())
    raise AssertionError("the engine never came to rest")


def note(replies, output):
    for out in output.outputs:
        reply = replies.setdefault(out.id, Reply())
        assert not reply.finish, "a finished request spoke again"
        reply.tokens += out.tokens
        reply.logprobs += out.logprobs
        reply.finish, reply.error, reply.cached = out.finish, out.error, out.cached_tokens


def ask(engine, prompt, params=None, **more):
    """One request, alone."""
    engine.add(Request("alone", tuple(prompt), params or greedy(), **more))
    return drain(engine)["alone"]
