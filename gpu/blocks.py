"""The pool of KV blocks, and the prefix cache over it. Plain Python: it moves numbers, never arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BLOCK_SIZE = 16
"""Tokens in a block."""


class BlockPool:
    """`total` blocks, each in exactly one state: free, in use, or cached with nobody using it.

    A cached block keeps its contents until it is needed for something else; the one unused longest goes
    first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total
        self._used = 0
        self._digest: list[bytes | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a prefix nobody uses now."""
        return len(self._idle)

    @property
    def in_use(self) -> int:
        """Blocks that sequences hold."""
        return self._used

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, evicting cached ones if need be; all of them or, with None, nothing."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        self._used += 1
        return block

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digest[block] = None

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The longest cached prefix of the chain. Nothing is taken: see `share`."""
        found = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Use matched blocks: each gets one more user."""
        for block in blocks:
            self._idle.pop(block, None)
            self._used += not self._users[block]
            self._users[block] += 1

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available now and would not after `share`."""
        return sum(block in self._idle for block in blocks)

    def register(self, block: int, digest: bytes) -> None:
        """Put a full, computed block into the cache. A twin that is there already stays the cached one."""
        if digest not in self._by_digest and self._digest[block] is None:
            self._by_digest[digest] = block
            self._digest[block] = digest

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one use of each.

        Deeper blocks become idle first, so that a prefix is evicted from its end.
        """
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block]:
                continue
            self._used -= 1
            if self._digest[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def clear_cache(self) -> None:
        """Forget every prefix that nobody uses."""
        while self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free.append(block)
