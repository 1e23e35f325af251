"""Blocks are conserved, whatever happens to them."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu.blocks import BlockPool


class AnyHistory(RuleBasedStateMachine):
    """Allocate, share, register, release and clear in any order."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.digests = 0

    @rule(count=st.integers(0, 7))
    def allocate(self, count):
        room = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > room)
        if blocks:
            assert len(set(blocks)) == count
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.register(data.draw(st.sampled_from(blocks)), bytes([data.draw(st.integers(0, 9))]))

    @rule(digest=st.integers(0, 9))
    def share(self, digest):
        found = self.pool.match([bytes([digest])])
        self.pool.share(found)
        if found:
            self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def clear(self):
        self.pool.clear_cache()

    @invariant()
    def blocks_are_conserved(self):
        pool = self.pool
        assert pool.free + pool.cached + pool.in_use == pool.total
        assert pool.in_use == len({block for blocks in self.held for block in blocks})
        assert pool.available == pool.free + pool.cached


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase


def test_the_prefix_unused_longest_is_evicted_first_and_from_its_end():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, digest in zip([*old, *new], [b"a", b"b", b"c", b"d"], strict=True):
        pool.register(block, digest)
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert pool.match([b"a", b"b"]) == old[:1]
    pool.allocate(1)
    assert pool.match([b"a"]) == []
    assert pool.match([b"c", b"d"]) == new


def test_a_match_ends_at_the_first_block_that_is_missing():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.register(blocks[0], b"1")
    pool.register(blocks[2], b"3")
    assert pool.match([b"1", b"2", b"3"]) == blocks[:1]


@given(st.integers(1, 5))
def test_a_twin_stays_out_of_the_cache(count):
    pool = BlockPool(count + 1)
    blocks = pool.allocate(count + 1)
    for block in blocks:
        pool.register(block, b"same")
    pool.release(blocks)
    assert (pool.cached, pool.free) == (1, count)
