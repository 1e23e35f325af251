"""The default model on a card, if its file is here: the golden text, and that no company changes a bit of a reply."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from gpu.engine import Engine
from gpu.engine_on_gpu import load_engine_on_gpu
from gpu.kernels.cuda_device import Device
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from gpu.tokenizer import load_tokenizer
from scripts.bench.report import Row
from scripts.gpu_invariance import Reply, Sizes, difference, invariance_rows, note
from scripts.model import models_directory

GOLDEN = "The capital of France is Paris."
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
TOGETHER = 8
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5)
SIZES = Sizes(rows=256, sequences=TOGETHER, blocks=0, prompts=(1, 17, 130, 33, 257), reply=24)
"""Blocks are as many as the card holds."""


def golden_rows(device: Device) -> list[Row]:
    """Right or wrong, as 1 or 0, and the histories of `gpu_invariance`; not run where the model's file is not here."""
    found = sorted(models_directory().glob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        return [Row("golden text", None, "", note="the default model is not here: antiphon model fetch")]
    engine = load_engine_on_gpu(found[0], device, max_batch=TOGETHER, token_budget=SIZES.rows)
    try:
        rows = rows_of(engine, found[0])
        return rows + invariance_rows("default model", engine.model, evolve(SIZES, blocks=engine.pool.total))
    finally:
        engine.close()


def rows_of(engine: Engine, file: Path) -> list[Row]:
    """The golden text alone; then with seven others, no two of one owner, so that none finds another's prefix."""
    tokenizer = load_tokenizer(file)
    prompt = tuple(tokenizer.encode(PROMPT, special=True))
    alone = replies_to(engine, {"alone": prompt})["alone"]
    company = replies_to(engine, {f"together {i}": prompt[i:] for i in range(TOGETHER)})
    text = tokenizer.decode_bytes(alone.tokens).decode(errors="replace")
    changed = difference(alone, company["together 0"])
    if any(reply.cached for reply in company.values()):
        changed = "a prefix was shared, which proves nothing"
    return [
        Row("golden text", float(text == GOLDEN), "", 1.0, note="" if text == GOLDEN else repr(text)),
        Row("the same in company", float(not changed), "", 1.0, note=changed),
    ]


def replies_to(engine: Engine, prompts: dict[str, tuple[int, ...]]) -> dict[str, Reply]:
    """Greedy replies, all prompts at once, each its own owner's."""
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, PARAMS, owner=name))
    replies = {name: Reply() for name in prompts}
    while engine.has_work:
        note(replies, engine.step())
    return replies
