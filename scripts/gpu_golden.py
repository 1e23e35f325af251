"""The default model on a card, if its file is here: the golden text, and that company changes no token."""

from __future__ import annotations

from gpu.engine import Engine
from gpu.engine_on_gpu import load_engine_on_gpu
from gpu.kernels.cuda_device import Device
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from gpu.tokenizer import load_tokenizer
from scripts.bench.report import Row
from scripts.model import models_directory

GOLDEN = "The capital of France is Paris."
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def golden_rows(device: Device) -> list[Row]:
    """Right or wrong, as 1 or 0; not run where the model's file is not here."""
    found = sorted(models_directory().glob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        return [Row("golden text", None, "", note="the default model is not here: antiphon model fetch")]
    engine = load_engine_on_gpu(found[0], device, max_batch=8, token_budget=256)
    tokenizer = load_tokenizer(found[0])
    prompt = tuple(tokenizer.encode(PROMPT, special=True))
    replies = replies_to(engine, {"alone": prompt})
    replies |= replies_to(engine, {f"together {i}": prompt[i:] for i in range(8)})
    engine.close()
    text = tokenizer.decode_bytes(replies["alone"]).decode()
    return [
        Row("golden text", float(text == GOLDEN), "", 1.0, note="" if text == GOLDEN else repr(text)),
        Row("the same in company", float(replies["together 0"] == replies["alone"]), "", 1.0),
    ]


def replies_to(engine: Engine, prompts: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Greedy replies, all prompts at once."""
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, SamplingParams(max_tokens=16, temperature=0.0)))
    replies: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for output in engine.step().outputs:
            replies[output.id] += output.tokens
    return replies
