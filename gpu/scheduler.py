"""Which tokens go into the next step: continuous batching by iteration, under a token budget.

Order. A request of priority p that arrives in step s has the virtual deadline `p * AGEING + s`, and
everything goes
by that one static key: first come first served within a priority, and a better priority overtakes by at most
`AGEING` steps a level.

Why nobody starves. Each step computes at least one token of the running sequence with the best key, which is
never
preempted, and which fits the pool alone (the engine refuses what does not). So it ends within as many steps
as it has
tokens. Waiting sequences enter strictly by key. Hence a sequence waits at most as many steps as there are
tokens in
those that ran when it came and in those with a better key; and only finitely many can still come to have one.
"""

from __future__ import annotations

from bisect import insort

from attrs import define, field, frozen

from gpu.blocks import BLOCK_SIZE, BlockPool
from gpu.errors import EngineFull
from gpu.sequence import Request, Sequence

AGEING = 256
"""Steps that one level of priority is worth."""
PRIORITY_LIMIT = 1000


@frozen
class Piece:
    """`count` tokens of `sequence` from `start` on, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether a token is to be sampled after it."""
        return self.start + self.count == len(self.sequence.tokens)


@define
class Plan:
    """One step's work, decoding sequences first."""

    pieces: list[Piece] = field(factory=list)
    preempted: list[Sequence] = field(factory=list)
    """Whose blocks were taken, though one may have got others in the same plan: it is among the pieces then."""
    admitted: list[Sequence] = field(factory=list)
    """Who left the queue for the first time."""
    queried: int = 0
    hits: int = 0


class Scheduler:
    """Holds every sequence that is waiting or running, and the blocks they use.

    `chunk_beside_decode` bounds the prompt tokens computed beside decoding sequences, who wait for them.
    """

    def __init__(self, pool: BlockPool, max_batch: int, token_budget: int, max_waiting: int) -> None:
        if token_budget <= max_batch:
            raise ValueError(
                f"token_budget {token_budget} must exceed max_batch {max_batch}: prefill must move on"
            )
        self.pool = pool
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_waiting = max_waiting
        self.chunk_beside_decode = token_budget
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.steps = 0
        self._arrivals = 0

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises `EngineFull` at the bound; nothing is kept then."""
        if len(self.waiting) >= self.max_waiting:
            raise EngineFull(f"{len(self.waiting)} requests wait already")
        deadline = request.priority * AGEING + self.steps
        sequence = Sequence(request, self._arrivals, deadline, [*request.prompt, *request.emitted])
        self._arrivals += 1
        insort(self.waiting, sequence, key=_rank)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state, and give its blocks back at once."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def plan(self) -> Plan:
        """Choose this step's pieces and find them blocks, preempting the worst-ranked if none are left."""
        self.steps += 1
        plan = Plan()
        for sequence in list(self.running):
            if sequence.pending == 1 and sequence not in plan.preempted:
                self._schedule(plan, sequence, 1)
        room = self.token_budget - len(plan.pieces)
        if plan.pieces:
            room = min(room, self.chunk_beside_decode)
        for sequence in list(self.running):
            if sequence.pending > 1 and sequence not in plan.preempted and room:
                room -= self._schedule(plan, sequence, min(sequence.pending, room))
        while room and self.waiting and len(self.running) < self.max_batch and self._admit(plan):
            sequence = self.running_newest
            room -= self._schedule(plan, sequence, min(sequence.pending, room))
        return plan

    def _schedule(self, plan: Plan, sequence: Sequence, count: int) -> int:
        """Plan `count` tokens; 0 if the sequence itself had to make room."""
        needed = -(-(sequence.computed + count) // BLOCK_SIZE) - len(sequence.blocks)
        if needed > 0:
            while (blocks := self.pool.allocate(needed)) is None:
                victim = self.running[-1]
                self._preempt(plan, victim)
                if victim is sequence:
                    return 0
            sequence.blocks += blocks
        plan.pieces.append(Piece(sequence, sequence.computed, count))
        return count

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        """Back into the queue at its old rank; what the prefix cache loses is computed again."""
        plan.pieces = [piece for piece in plan.pieces if piece.sequence is not victim]
        plan.preempted.append(victim)
        self.running.remove(victim)
        self._release(victim)
        insort(self.waiting, victim, key=_rank)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = 0

    def _admit(self, plan: Plan) -> bool:
        """Let the first in the queue run, if all its tokens and the next find room."""
        sequence = self.waiting[0]
        # The last token is always computed: its logits are what the next one is sampled from.
        matchable = (len(sequence.tokens) - 1) // BLOCK_SIZE
        shared = self.pool.match(sequence.digests(BLOCK_SIZE, matchable))
        fresh = -(-(len(sequence.tokens) + 1) // BLOCK_SIZE) - len(shared)
        limit = self.pool.total - len(shared)
        if min(fresh, limit) > self.pool.available - self.pool.idle_among(shared):
            return False
        self.pool.share(shared)
        self.waiting.pop(0)
        insort(self.running, sequence, key=_rank)
        self.running_newest = sequence
        sequence.blocks = shared
        sequence.computed = len(shared) * BLOCK_SIZE
        sequence.registered = len(shared)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt))
            plan.admitted.append(sequence)
            plan.queried += len(sequence.request.prompt)
            plan.hits += sequence.cached_tokens
        return True

    def computed(self, piece: Piece) -> None:
        """The step ran: the piece's KV is there, and blocks it filled may be shared from now on."""
        sequence = piece.sequence
        sequence.computed = piece.start + piece.count
        full = sequence.computed // BLOCK_SIZE
        if full > sequence.registered:
            digests = list(sequence.digests(BLOCK_SIZE, full))
            for i in range(sequence.registered, full):
                self.pool.register(sequence.blocks[i], digests[i])
            sequence.registered = full


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
