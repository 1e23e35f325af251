"""Scheduling over random histories: who goes first, how long anybody waits, and what becomes of the blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.blocks import BLOCK_SIZE, BlockPool
from gpu.errors import EngineFull
from gpu.sampling_params import SamplingParams
from gpu.scheduler import AGEING, Scheduler
from gpu.sequence import Request, cache_salt


def _request(name, prompt, reply, priority=0, salt=0):
    tokens = tuple((salt * 7 + i) % 50 for i in range(prompt))
    return Request(name, tokens, SamplingParams(max_tokens=reply), priority=priority)


class Simulation:
    """A scheduler whose model makes token 1, 2, 3 …; every step is checked."""

    def __init__(self, blocks=7, max_batch=4, token_budget=12):
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, max_batch, token_budget, max_waiting=1000)
        self.alive = {}
        self.began = {}
        self.bound = {}
        self.waited = {}

    def add(self, request):
        sequence = self.scheduler.add(request)
        total = len(request.prompt) + request.params.max_tokens
        ahead = [
            other
            for other in self.alive.values()
            if other.rank < sequence.rank or other in self.scheduler.running
        ]
        self.bound[request.id] = sum(len(o.request.prompt) + o.request.params.max_tokens for o in ahead) + 1
        self.alive[request.id] = sequence
        self.waited[request.id] = 0
        # Those that come later with a better key are ahead as well.
        for name, other in self.alive.items():
            if other is not sequence and sequence.rank < other.rank:
                self.bound[name] += total

    def step(self):
        plan = self.scheduler.plan()
        assert plan.pieces or not self.alive, "somebody waits and nothing runs"
        assert sum(piece.count for piece in plan.pieces) <= self.scheduler.token_budget
        assert len(plan.pieces) <= self.scheduler.max_batch
        for name, sequence in self.alive.items():
            if sequence in self.scheduler.running:
                self.began.setdefault(name, self.scheduler.steps)
            elif name not in self.began:
                self.waited[name] += 1
        for piece in plan.pieces:
            sequence = piece.sequence
            assert piece.start == sequence.computed
            assert len(sequence.blocks) == -(-(piece.start + piece.count) // BLOCK_SIZE)
            last = piece.is_last
            self.scheduler.computed(piece)
            if last:
                sequence.tokens.append(len(sequence.tokens) % 50)
                if sequence.position >= sequence.request.params.max_tokens:
                    self.scheduler.remove(sequence)
                    del self.alive[sequence.request.id]
        self.check()
        return plan

    def check(self):
        pool = self.pool
        assert pool.free + pool.cached + pool.in_use == pool.total
        held = {block for sequence in self.alive.values() for block in sequence.blocks}
        assert pool.in_use == len(held)
        for sequence in self.scheduler.waiting:
            assert not sequence.blocks


histories = st.lists(
    st.tuples(
        st.integers(1, 60), st.integers(1, 40), st.integers(-2, 2), st.integers(0, 3), st.integers(0, 5)
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(histories, st.integers(1, 12))
def test_everybody_finishes_nobody_waits_past_the_bound_and_blocks_are_conserved(history, chunk):
    simulation = Simulation()
    simulation.scheduler.chunk_beside_decode = chunk
    for i, (prompt, reply, priority, salt, pause) in enumerate(history):
        simulation.add(_request(str(i), prompt, reply, priority, salt))
        for _ in range(pause):
            simulation.step()
    for _ in range(10_000):
        if not simulation.alive:
            break
        simulation.step()
    assert not simulation.alive
    for name, waited in simulation.waited.items():
        assert waited <= simulation.bound[name], name
    assert simulation.pool.in_use == 0


@settings(max_examples=80, deadline=None)
@given(histories)
def test_first_come_first_served_within_a_priority(history):
    simulation = Simulation()
    order = {}
    for i, (prompt, reply, priority, salt, pause) in enumerate(history):
        simulation.add(_request(str(i), prompt, reply, priority, salt))
        order.setdefault(priority, []).append(str(i))
        for _ in range(pause):
            simulation.step()
    while simulation.alive:
        simulation.step()
    for names in order.values():
        begins = [simulation.began[name] for name in names]
        assert begins == sorted(begins)


@settings(max_examples=80, deadline=None)
@given(histories, st.data())
def test_cancelling_in_any_state_frees_the_blocks_at_once(history, data):
    simulation = Simulation()
    for i, (prompt, reply, priority, salt, pause) in enumerate(history):
        simulation.add(_request(str(i), prompt, reply, priority, salt))
        for _ in range(pause):
            simulation.step()
        if simulation.alive and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(simulation.alive)))
            simulation.scheduler.remove(simulation.alive.pop(name))
            simulation.check()
    while simulation.alive:
        simulation.step()
    assert simulation.pool.in_use == 0


def test_decoding_goes_first_and_a_prompt_is_cut_beside_it():
    simulation = Simulation(blocks=20, token_budget=32)
    simulation.add(_request("a", 3, 9))
    simulation.step()
    simulation.scheduler.chunk_beside_decode = 8
    simulation.add(_request("b", 30, 2))
    pieces = simulation.step().pieces
    assert [(piece.sequence.request.id, piece.count) for piece in pieces] == [("a", 1), ("b", 8)]


def test_a_better_priority_overtakes_but_not_for_ever():
    scheduler = Scheduler(BlockPool(4), 1, 8, 1000)
    low = scheduler.add(_request("low", 4, 4, priority=1))
    for i in range(3):
        scheduler.add(_request(f"high{i}", 4, 4))
    assert scheduler.waiting[-1] is low
    scheduler.steps += AGEING
    scheduler.add(_request("late", 4, 4))
    assert [s.request.id for s in scheduler.waiting] == ["high0", "high1", "high2", "low", "late"]


def test_the_queue_is_bounded():
    scheduler = Scheduler(BlockPool(4), 1, 8, max_waiting=2)
    scheduler.add(_request("a", 1, 1))
    scheduler.add(_request("b", 1, 1))
    with pytest.raises(EngineFull, match="2 requests wait"):
        scheduler.add(_request("c", 1, 1))
    assert len(scheduler.waiting) == 2


def test_a_budget_that_leaves_prefill_nothing_is_refused():
    with pytest.raises(ValueError, match="must exceed max_batch"):
        Scheduler(BlockPool(4), 8, 8, 1)


def test_salts_of_different_splits_differ():
    assert (
        len({cache_salt("ab", "c"), cache_salt("a", "bc"), cache_salt("abc", ""), cache_salt("", "abc")}) == 4
    )
