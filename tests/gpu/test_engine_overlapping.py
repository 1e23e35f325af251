"""The next step is started before the last one's tokens are given out; whatever is cancelled meanwhile harms nobody.

The model here keeps tokens where a real one keeps keys and values. It computes when a step is finished, from what
lies in the blocks then, and hashes a sequence's whole context into its next token: one wrong token in one block, and
the reply differs.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from driving import Reply, drain, greedy, note
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu.blocks import BLOCK_SIZE
from gpu.engine import Engine
from gpu.errors import GpuFailed, GpuFull, StepTooLarge
from gpu.kernels import MAX_TOP_LOGPROBS, StepResult
from gpu.sequence import Request

VOCAB, SPOILT = 97, -1


def next_token(context):
    return hash(tuple(context)) % VOCAB


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class HashingModel:
    """`faults`: what the next starts raise, None for those that go well. `log`: starts and ends in order."""

    def __init__(self, blocks, *, overlaps=True):
        self.config = SimpleNamespace(vocab_size=VOCAB, context_length=10_000)
        self.kernels = SimpleNamespace(
            overlaps=overlaps, block_bytes=1, close=lambda: self.log.append("close")
        )
        self.cache = np.full(blocks * BLOCK_SIZE, SPOILT)
        self.started = None
        self.faults = []
        self.log = []

    def start(self, batch):
        assert self.started is None, "two steps are under way"
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        self.log.append("start")
        self.started = copy.deepcopy(batch)
        return self.started

    def finish(self, batch):
        assert batch is self.started
        self.log.append("finish")
        self.started = None
        self.cache[batch.slots] = batch.tokens
        sequence_of = np.repeat(np.arange(len(batch.sequences)), batch.sequences[:, 1])
        tokens = [
            self._sample(batch.tables[sequence_of[row]], batch.positions[row]) for row in batch.logit_rows
        ]
        tops = np.zeros((len(tokens), MAX_TOP_LOGPROBS))
        chances = np.zeros(len(tokens))
        return StepResult(np.array(tokens, np.int32), chances, tops.astype(np.int32), tops, 2.0, 1.0, 0.0, 10)

    def _sample(self, table, position):
        at = np.arange(position + 1)
        return next_token(self.cache[table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE].tolist())


def engine_over(blocks=7, *, overlaps=True):
    """What a block held is gone as soon as it is given back, and none is handed out while a step is under way."""
    model = HashingModel(blocks, overlaps=overlaps)
    engine = Engine(model, eos_ids=(), blocks=blocks, max_batch=4, token_budget=12)
    allocate, release = engine.pool.allocate, engine.pool.release

    def allocate_when_quiet(count):
        assert model.started is None, "blocks are handed out while a step runs"
        return allocate(count)

    def release_and_spoil(blocks):
        release(blocks)
        model.cache.reshape(-1, BLOCK_SIZE)[engine.pool._free] = SPOILT

    engine.pool.allocate, engine.pool.release = allocate_when_quiet, release_and_spoil
    return engine


class History:
    """An engine, what was asked of it, and what it said."""

    def __init__(self, overlaps):
        self.engine = engine_over(overlaps=overlaps)
        self.replies, self.asked, self.cancelled = {}, {}, set()

    def add(self, length, count, salt):
        name, prompt = str(len(self.asked)), tuple((salt + i) % VOCAB for i in range(length))
        self.asked[name] = prompt, count
        self.engine.add(Request(name, prompt, greedy(count)))

    def cancel(self, number):
        if self.engine.cancel(str(number)):
            self.cancelled.add(str(number))

    def lack_memory(self, starts):
        self.engine.model.faults += [GpuFull("full")] * starts

    def step(self, times=1):
        for _ in range(times):
            try:
                note(self.replies, self.engine.step())
            except GpuFull:
                assert self.engine.model.started is None
            pool = self.engine.pool
            assert pool.free + pool.cached + pool.in_use == pool.total


actions = st.lists(
    st.one_of(
        st.tuples(st.just(History.add), st.integers(1, 50), st.integers(1, 40), st.integers(0, 2)),
        st.tuples(st.just(History.cancel), st.integers(0, 7)),
        st.tuples(st.just(History.lack_memory), st.integers(1, 2)),
        st.tuples(st.just(History.step), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=40,
)
PREEMPTED_AND_LET_IN_AGAIN_AT_ONCE = [(History.add, 32, 34, 0), (History.add, 16, 32, 0)]


@pytest.mark.parametrize("overlaps", [False, True])
@settings(max_examples=120, deadline=None)
@given(actions)
@example(PREEMPTED_AND_LET_IN_AGAIN_AT_ONCE)
def test_replies_are_right_and_blocks_conserved_whatever_is_cancelled_and_when(overlaps, taken):
    history = History(overlaps)
    for action, *numbers in taken:
        action(history, *numbers)
    while history.engine.has_work:
        history.step()
    assert history.replies.keys() == history.asked.keys()
    for name, reply in history.replies.items():
        whole = expected(*history.asked[name])
        if name in history.cancelled:
            assert (reply.finish, reply.tokens) == ("cancelled", whole[: len(reply.tokens)])
        else:
            assert (reply.finish, reply.tokens) == ("length", whole)
    assert history.engine.model.started is None
    assert history.engine.pool.in_use == 0


def test_the_next_step_is_on_its_way_when_tokens_are_given_out():
    engine = engine_over()
    engine.add(Request("a", (1, 2), greedy(3)))
    seen = []
    while engine.has_work:
        output = engine.step()
        seen.append((output.outputs[0].position, engine.model.started is not None))
    assert seen == [(0, True), (1, True), (2, False)]
    assert engine.model.log == ["start", "finish"] * 3


def test_kernels_that_do_not_overlap_start_nothing_ahead():
    engine = engine_over(overlaps=False)
    engine.add(Request("a", (1, 2), greedy(2)))
    engine.step()
    assert engine.model.log == ["start", "finish"]


def test_an_id_that_is_cancelled_and_added_again_does_not_get_the_token_of_its_former_life():
    engine = engine_over()
    engine.add(Request("a", (1, 2), greedy(9)))
    engine.step()
    engine.cancel("a")
    engine.add(Request("a", (5, 6, 7), greedy(4)))
    outputs = [out for out in engine.step().outputs if not out.finish]
    assert outputs == []
    assert drain(engine)["a"].tokens == expected((5, 6, 7), 4)


def test_a_neighbour_of_one_that_is_cancelled_gets_its_own_sample():
    engine = engine_over()
    replies = {}
    for name in ("first", "second", "third"):
        engine.add(Request(name, (len(name),), greedy(6)))
    note(replies, engine.step())
    engine.cancel("first")
    while engine.has_work:
        note(replies, engine.step())
    assert replies["first"] == Reply(expected((5,), 1), finish="cancelled")
    assert replies["second"].tokens == expected((6,), 6)


def test_tokens_go_out_although_the_next_step_finds_no_memory():
    engine = engine_over()
    engine.add(Request("a", (1, 2), greedy(2)))
    engine.model.faults = [None, GpuFull("full"), GpuFull("full still")]
    (first,) = engine.step().outputs
    assert first.tokens == tuple(expected((1, 2), 1))
    with pytest.raises(GpuFull, match="still"):
        engine.step()
    (second,) = engine.step().outputs
    assert (second.position, second.tokens) == (1, tuple(expected((1, 2), 2)[1:]))


def test_tokens_go_out_although_the_device_has_failed():
    engine = engine_over()
    engine.add(Request("a", (1, 2), greedy(2)))
    engine.model.faults = [None, *[GpuFailed("gone")] * 2]
    (first,) = engine.step().outputs
    assert first.tokens == tuple(expected((1, 2), 1))
    with pytest.raises(GpuFailed, match="gone"):
        engine.step()


def test_what_makes_the_next_step_too_large_ends_and_the_rest_goes_on():
    engine = engine_over()
    engine.add(Request("light", (1, 2), greedy(3)))
    engine.add(Request("heavy", (3, 4), greedy(3, logit_bias=((5, 1.0),))))
    engine.model.faults = [None, StepTooLarge("too many biases")]
    replies = drain(engine)
    assert replies["light"].tokens == expected((1, 2), 3)
    assert (replies["heavy"].finish, replies["heavy"].error) == ("error", "too many biases")
    assert replies["heavy"].tokens == expected((3, 4), 1)


def test_a_step_s_figures_are_its_own():
    engine = engine_over()
    engine.add(Request("a", (1, 2, 3), greedy(3)))
    first, second = engine.step().stats, engine.step().stats
    assert (first.prefilled, first.decoded, second.prefilled, second.decoded) == (3, 0, 0, 1)
    assert (first.prefix_queried, second.prefix_queried) == (3, 0)
    assert (first.forward_seconds, first.sampling_seconds, first.bytes_moved) == (2.0, 1.0, 10)


def test_closing_waits_for_the_step_that_is_under_way():
    engine = engine_over()
    engine.add(Request("a", (1, 2), greedy(3)))
    engine.step()
    engine.close()
    assert engine.model.log == ["start", "finish", "start", "finish", "close"]
