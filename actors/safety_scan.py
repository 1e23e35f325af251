"""Finding a policy's matches in a text that comes in pieces.

The result does not depend on where the text was cut: a match is found at the character that completes it
(for whole words: at the next visible one, or the end), the earliest completed wins, then the one that begins
first, then the rule that stands first. What may still become a match is held back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field, frozen

from actors.safety_policy import Rule, RuleSet
from actors.shadow import SHADOWS, WORDLIKE

LOOKBACK = 32
"""Unseen characters in a row that are looked past for a word's left neighbour; `Screen.context` has more."""


@frozen
class Match:
    """A rule matched from this code point of the scanned text on."""

    rule: Rule
    start: int


def first_match(rules: RuleSet, text: str, context: str, final: bool) -> Match | int:
    """Return the first completed match, or how many characters of `text` nothing that follows can make bad.

    `context` is what stands before `text` and was passed already; `final` says that nothing follows.
    """
    scan = Scan(rules)
    scan.read_context(context)
    for match in scan.read(text):
        return match
    if final:
        for match in scan.finish():
            return match
        return len(text)
    return min(scan.held_from, len(text))


def all_matches(rules: RuleSet, text: str) -> Iterator[Match]:
    """Yield every completed match of a whole text, in the order of completion."""
    scan = Scan(rules)
    yield from scan.read(text)
    yield from scan.finish()


@define
class Scan:
    """A scan in progress. `_alive` maps a position of the automaton to the code point its match began at."""

    _rules: RuleSet
    _alive: dict[int, int] = field(init=False, factory=dict)
    _pending: list[tuple[int, int]] = field(init=False, factory=list)
    """(start, rule) of whole-word matches that wait for their right neighbour."""
    _left: str = field(init=False, default="")
    """The last shadow character, "" at the start and after `LOOKBACK` characters without any."""
    _unseen: int = field(init=False, default=0)
    _read: int = field(init=False, default=0)

    @property
    def held_from(self) -> int:
        """The code point from which on a match may be in the making; as many as were read when none is."""
        starts = [*self._alive.values(), *(start for start, _ in self._pending)]
        return min(starts, default=self._read)

    def read_context(self, context: str) -> None:
        """Learn the left neighbour of the text to come."""
        for char in context[-LOOKBACK - 1 :]:
            casts = SHADOWS[char]
            if not casts:
                self._pass_unseen()
            for cast in casts:
                self._left, self._unseen = cast, 0

    def read(self, text: str) -> Iterator[Match]:
        """Scan the next piece; yield matches as they are completed."""
        starts, starts_inside = self._rules.starts, self._rules.starts_inside
        for char in text:
            casts = SHADOWS[char]
            if not casts:
                self._pass_unseen()
            for cast in casts:
                inside_word = WORDLIKE[cast] and WORDLIKE[self._left]
                beginning = starts_inside[cast] if inside_word else starts[cast]
                if beginning or self._alive or self._pending:
                    yield from self._feed(cast, inside_word, beginning)
                self._left = cast
                self._unseen = 0
            self._read += 1

    def finish(self) -> Iterator[Match]:
        """End the text: whole words at its end are whole."""
        yield from self._settle(inside_word=False)

    def _pass_unseen(self) -> None:
        self._unseen += 1
        if self._unseen >= LOOKBACK:
            self._left = ""

    def _feed(self, cast: str, inside_word: bool, beginning: tuple[int, ...]) -> list[Match]:
        found = self._settle(inside_word) if self._pending else []
        if not (cast == " " == self._left):
            self._step(cast, beginning)
            found += self._accept()
        return found

    def _step(self, cast: str, beginning: tuple[int, ...]) -> None:
        follow, chars = self._rules.follow, self._rules.chars
        after: dict[int, int] = {}
        for position, start in self._alive.items():
            for following in follow[position]:
                if cast in chars[following] and start < after.get(following, start + 1):
                    after[following] = start
        for position in beginning:
            after.setdefault(position, self._read)
        self._alive = after

    def _accept(self) -> list[Match]:
        """Return the matches that end here; those of whole words wait for what comes next."""
        rules = self._rules
        found = []
        for start, rule in sorted((self._alive[p], rules.owner[p]) for p in self._alive.keys() & rules.last):
            if rules.rules[rule].word:
                self._pending.append((start, rule))
            else:
                found.append(Match(rules.rules[rule], start))
        return found

    def _settle(self, inside_word: bool) -> list[Match]:
        """Decide the whole-word matches that ended just before this character."""
        ready = [] if inside_word else sorted(self._pending)
        self._pending.clear()
        return [Match(self._rules.rules[rule], start) for start, rule in ready]
