"""Through the engine, whatever happens around a reply: its tokens and log-probabilities are the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import numpy as np
from attrs import evolve, field, frozen, mutable

from gpu.blocks import BLOCK_SIZE
from gpu.engine import Engine
from gpu.kernels.cuda import Limits, Program
from gpu.kernels.cuda_device import Array, Device
from gpu.kernels.cuda_weights import bf16_bits
from gpu.llama import Llama
from gpu.model_config import ModelConfig
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request, StepOutput, TokenLogprob
from scripts.bench.report import Row
from scripts.gpu_speed import MadeUpKernels, ShapeOnly

MADE_UP = ModelConfig("llama", 3, 1024, 2816, 16, 4, 64, 5003, 1024, 1e-5, 1e4, "halves")
"""Small, but with more than one piece of every sum that is cut in pieces, and an odd vocabulary."""
CONTRAST = 2.0
"""Weights are so much larger than would keep the size of what they multiply: attention looks somewhere then."""
CHOICES = (
    SamplingParams(0, temperature=0.0),
    SamplingParams(0, temperature=0.8, top_p=0.9),
    SamplingParams(0, temperature=1.2, top_k=40, min_p=0.02),
    SamplingParams(0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(0, temperature=0.7, logit_bias=((3, 2.0), (5, -9.0))),
)
"""Every way to choose a token, taken in turn."""
NEIGHBOUR_TOKENS = 3
"""So few that all neighbours fit into the first step and decode from then on."""


@frozen
class Sizes:
    """What a model was loaded for, and what is asked of it."""

    rows: int
    """Of a step at most; the first step holds all neighbours, and a few prompts whole."""
    sequences: int
    blocks: int
    prompts: tuple[int, ...]
    """Their lengths."""
    reply: int
    """Tokens of each; more than a block of them, so that a sequence needs another while it decodes."""
    few: int = 4
    """Sequences at once where prompts are cut."""
    """Sequences at once where prompts are cut."""

    @property
    def cut(self) -> int:
        """Tokens of a step in which prompts are cut: few, and an odd number, so that cuts fall anywhere in a block."""
        return (self.few + 1) | 1

    @property
    def neighbour_reply(self) -> int:
        """Long enough to be there until the last reply has ended, even when prompts enter four tokens at a time."""
        return sum(self.prompts) // 4 + 2 * self.reply


ON_CARD = Sizes(rows=512, sequences=96, blocks=3072, prompts=(1, 17, 130, 300, 33, 257), reply=40)
"""Above 64 rows a step takes other kernels than below, above 128 keys attention takes more than one piece."""


@mutable
class Reply:
    """What came of one request."""

    tokens: list[int] = field(factory=list)
    logprobs: list[TokenLogprob] = field(factory=list)
    finish: str = ""
    error: str = ""
    cached: int = 0

    def bits(self) -> tuple[tuple[object, ...], ...]:
        """Every token and every float, such that two are equal only where all bits are."""
        chances = [(one.logprob.hex(), *((t, p.hex()) for t, p in one.top)) for one in self.logprobs]
        return tuple(zip(self.tokens, chances, strict=True))


class Unproved(Exception):
    """A history went by without what it is there for."""


@frozen
class Trial:
    """One model, and the requests whose replies are compared."""

    model: Llama
    sizes: Sizes
    requests: tuple[Request, ...]

    def engine(self, *, rows: int = 0, sequences: int = 0, blocks: int = 0) -> Engine:
        """A new one over the same kernels, its prefix cache empty."""
        sizes = self.sizes
        return Engine(
            self.model,
            eos_ids=(),
            blocks=blocks or sizes.blocks,
            max_batch=sequences or sizes.sequences,
            token_budget=rows or sizes.rows,
        )

    def run(
        self,
        engine: Engine,
        requests: tuple[Request, ...],
        look: Callable[[StepOutput], None] = lambda _: None,
    ) -> dict[str, Reply]:
        """All of `requests` at once, to their ends."""
        replies = {request.id: Reply() for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            output = engine.step()
            note(replies, output)
            look(output)
        return replies


def note(replies: dict[str, Reply], output: StepOutput) -> None:
    """Add to `replies` what a step brought for them."""
    for out in output.outputs:
        if out.id in replies:
            reply = replies[out.id]
            reply.tokens += out.tokens
            reply.logprobs += out.logprobs
            reply.finish, reply.error, reply.cached = out.finish, out.error, out.cached_tokens


def alone(trial: Trial) -> dict[str, Reply]:
    """One after the other, each in an engine that has seen nothing."""
    replies: dict[str, Reply] = {}
    for request in trial.requests:
        replies |= trial.run(trial.engine(), (request,))
    return replies


def together(trial: Trial) -> dict[str, Reply]:
    """All at once: their prompts share steps, and so do their replies."""
    most = 0

    def look(output: StepOutput) -> None:
        nonlocal most
        most = max(most, output.stats.batch)

    replies = trial.run(trial.engine(), trial.requests, look)
    if most < 2:
        raise Unproved("no two were ever in one step")
    return replies


def in_a_crowd(trial: Trial) -> dict[str, Reply]:
    """Among as many others as the model was loaded for, all of them decoding; those are cancelled at the end."""
    sizes, engine = trial.sizes, trial.engine()
    params = SamplingParams(sizes.neighbour_reply, temperature=1.0, ignore_eos=True)
    others = [f"other {i}" for i in range(sizes.sequences - len(trial.requests))]
    for i, name in enumerate(others):
        prompt = tuple((i + k) % trial.model.config.vocab_size for k in range(1 + i % NEIGHBOUR_TOKENS))
        engine.add(Request(name, prompt, evolve(params, seed=i), owner=name))
    running, most = {request.id for request in trial.requests}, 0

    def look(output: StepOutput) -> None:
        nonlocal most
        most = max(most, output.stats.batch)
        ended = {out.id for out in output.outputs if out.finish}
        if running and not running - ended:
            for name in others:
                engine.cancel(name)
        running.difference_update(ended)

    replies = trial.run(engine, trial.requests, look)
    if most < sizes.sequences:
        raise Unproved(f"at most {most} of {sizes.sequences} were in one step")
    return replies


def cut_up(trial: Trial) -> dict[str, Reply]:
    """A few tokens of a prompt at a time, some beside sequences that decode."""
    sizes = trial.sizes
    if max(sizes.prompts) <= sizes.cut:
        raise Unproved("no prompt is long enough to be cut")
    return trial.run(trial.engine(rows=sizes.cut, sequences=sizes.few), trial.requests)


def preempted(trial: Trial) -> dict[str, Reply]:
    """Each behind another of its length, with blocks for both prompts or for one reply: it must make room.

    The other came first and grows; when the last block is gone, the one behind loses all of its own. It is computed
    again from prompt and tokens so far.
    """
    replies: dict[str, Reply] = {}
    times = 0

    def look(output: StepOutput) -> None:
        nonlocal times
        times += output.stats.preemptions

    for number, request in enumerate(trial.requests, 1):
        first, last = (len(request.prompt) + count for count in (1, trial.sizes.reply))
        blocks = max(2 * -(-first // BLOCK_SIZE), -(-last // BLOCK_SIZE))
        ahead = evolve(request, id="ahead", owner="another")
        replies |= trial.run(trial.engine(blocks=blocks, sequences=2), (ahead, request), look)
        if times < number:
            raise Unproved(f"{request.id} was not preempted")
    del replies["ahead"]
    return replies


def taken_up(trial: Trial) -> dict[str, Reply]:
    """Cancelled, each at another token, and asked for again from prompt and tokens so far, as after a crash.

    The owner is another then, so that nothing is found in the prefix cache. Where kernels overlap, a step that
    makes one more token is under way when a sequence is cancelled.
    """
    engine, sizes = trial.engine(), trial.sizes
    replies = {request.id: Reply() for request in trial.requests}
    ends = {request.id: 1 + 7 * i % (sizes.reply - 1) for i, request in enumerate(trial.requests)}
    for request in trial.requests:
        engine.add(request)
    while engine.has_work:
        note(replies, engine.step())
        for request in trial.requests:
            reply = replies[request.id]
            if len(reply.tokens) >= ends.get(request.id, math.inf) and engine.cancel(request.id):
                del ends[request.id]
            elif reply.finish == "cancelled":
                reply.finish = ""
                engine.add(evolve(request, emitted=tuple(reply.tokens), owner="another"))
    if ends:
        raise Unproved(f"{', '.join(ends)} ended before it could be taken up again")
    return replies


def from_the_cache(trial: Trial) -> dict[str, Reply]:
    """Twice in the same engine: the second time most of the prompt is there already."""
    replies: dict[str, Reply] = {}
    for request in trial.requests:
        engine = trial.engine()
        trial.run(engine, (request,))
        replies |= trial.run(engine, (request,))
    if not any(reply.cached for reply in replies.values()):
        raise Unproved("nothing was found in the prefix cache")
    return replies


HISTORIES: dict[str, Callable[[Trial], dict[str, Reply]]] = {
    "alone again": alone,
    "together": together,
    "in a crowd": in_a_crowd,
    "cut into chunks": cut_up,
    "preempted": preempted,
    "taken up again": taken_up,
    "from the prefix cache": from_the_cache,
}


def made_up_rows(device: Device, config: ModelConfig = MADE_UP, sizes: Sizes = ON_CARD) -> list[Row]:
    """Every history with a model whose weights are drawn here; closes what it loads."""
    random = np.random.default_rng(7)

    def fill(rows: int, columns: int) -> Array:
        weights = random.standard_normal((rows, columns), np.float32) * (CONTRAST / math.sqrt(columns))
        return device.upload(bf16_bits(weights))

    limits = Limits(sizes.rows, sizes.sequences, config.context_length)
    kernels = MadeUpKernels(ShapeOnly(config), device, limits, fill)
    model = Llama(kernels.shape_only, kernels)
    kernels.allocate_cache(
        sizes.blocks
    )  # a cache for each layer, unlike `make_up`'s: what is read was written
    try:
        return invariance_rows("made-up model", model, sizes)
    finally:
        kernels.close()


def invariance_rows(name: str, model: Llama, sizes: Sizes) -> list[Row]:
    """How many replies differ from those alone, history by history; and on CUDA, whether graphs were replayed."""
    trial = Trial(model, sizes, requests_for(model, sizes))
    expected = alone(trial)
    row = _of_alone(f"{name}, alone", sizes, expected)
    if not row.reaches(row.floor):
        return [row]
    rows = [row, *(_compared(f"{name}, {what}", trial, expected, run) for what, run in HISTORIES.items())]
    if isinstance(model.program, Program):
        rows.append(Row(f"{name}, graphs of decode steps", len(model.program.graphs), "", 1.0))
    return rows


def requests_for(model: Llama, sizes: Sizes) -> tuple[Request, ...]:
    """One for each of `sizes.prompts`: random tokens, and a way to choose."""
    random = np.random.default_rng(5)
    vocabulary = model.config.vocab_size
    return tuple(
        Request(
            f"request {i}",
            tuple(random.integers(0, vocabulary, length).tolist()),
            evolve(choice, max_tokens=sizes.reply, seed=i, ignore_eos=True, logprobs=5),
        )
        for i, (length, choice) in enumerate(zip(sizes.prompts, cycle(CHOICES), strict=False))
    )


def _of_alone(name: str, sizes: Sizes, replies: dict[str, Reply]) -> Row:
    """Whether the replies are worth comparing: whole, finite, and from a model that does not always say the same."""
    for asked, reply in replies.items():
        if reply.error or len(reply.tokens) != sizes.reply:
            return Row(name, None, "", note=f"failed: {asked}: {reply.error or f'only {reply.tokens}'}")
        if not all(math.isfinite(one.logprob) for one in reply.logprobs):
            return Row(name, None, "", note=f"failed: {asked}: a log-probability is not finite")
    seen = [one.top for reply in replies.values() for one in reply.logprobs]
    unlike = len(set(seen)) / len(seen)
    return Row(name, unlike, "of the distributions are unlike", floor=0.5)


def _compared(
    name: str, trial: Trial, expected: dict[str, Reply], run: Callable[[Trial], dict[str, Reply]]
) -> Row:
    unit = "replies that differ"
    try:
        replies = run(trial)
    except Exception as error:  # noqa: BLE001 - one history's failure is its own
        return Row(name, None, unit, note=f"failed: {type(error).__name__}: {error}")
    differing = {asked: difference(expected[asked], reply) for asked, reply in replies.items()}
    notes = [f"{asked}: {what}" for asked, what in differing.items() if what]
    return Row(name, len(notes), unit, floor=0, better="lower", note="; ".join(notes[:1]))


def difference(expected: Reply, reply: Reply) -> str:
    """Where two replies part; "" where all bits are the same."""
    if reply.error:
        return reply.error
    for i, (right, found) in enumerate(zip(expected.bits(), reply.bits(), strict=False)):
        if right[0] != found[0]:
            return f"token {i} is {found[0]}, alone it is {right[0]}"
        if right != found:
            return f"token {i} is the same, its log-probabilities are not"
    counts = len(reply.tokens), len(expected.tokens)
    return "" if counts[0] == counts[1] else f"{counts[0]} tokens, alone {counts[1]}"
