"""Finding a policy's matches in a text that comes in pieces.

The result does not depend on where the text was cut: a match is found at the character that completes it
(for whole words: at the next visible one, or the end), the earliest completed wins, then the one that begins
first, then the rule that stands first. What may still become a match is held back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field, frozen

from actors.safety_policy import Rule, RuleSet
from actors.shadow import fold, is_wordlike

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
        for char in context:
            casts = fold(char)
            if not casts:
                self._pass_unseen()
            for cast in casts:
                self._left, self._unseen = cast, 0

    def read(self, text: str) -> Iterator[Match]:
        """Scan the next piece; yield matches as they are completed."""
        alive_or_pending = False
        beginning_with = self._rules.beginning_with
        for char in text:
            casts = fold(char)
            if not casts:
                self._pass_unseen()
            for cast in casts:
                if alive_or_pending or beginning_with(cast):
                    yield from self._feed(cast)
                    alive_or_pending = bool(self._alive or self._pending)
                self._left, self._unseen = cast, 0
            self._read += 1

    def finish(self) -> Iterator[Match]:
        """End the text: whole words at its end are whole."""
        yield from self._settle("")

    def _pass_unseen(self) -> None:
        self._unseen += 1
        if self._unseen >= LOOKBACK:
            self._left = ""

    def _feed(self, cast: str) -> Iterator[Match]:
        yield from self._settle(cast)
        if cast == " " and self._left == " ":
            return
        self._alive = self._step(cast)
        yield from self._accept()

    def _step(self, cast: str) -> dict[int, int]:
        rules = self._rules
        after: dict[int, int] = {}
        for position, start in self._alive.items():
            for following in rules.follow[position]:
                if cast in rules.chars[following] and start < after.get(following, start + 1):
                    after[following] = start
        inside_word = is_wordlike(cast) and is_wordlike(self._left)
        for position in rules.beginning_with(cast):
            if not (inside_word and rules.rules[rules.owner[position]].word):
                after.setdefault(position, self._read)
        return after

    def _accept(self) -> Iterator[Match]:
        rules = self._rules
        done = sorted((start, rules.owner[p]) for p, start in self._alive.items() if p in rules.last)
        for start, rule in done:
            if rules.rules[rule].word:
                self._pending.append((start, rule))
            else:
                yield Match(rules.rules[rule], start)

    def _settle(self, cast: str) -> Iterator[Match]:
        """Decide the whole-word matches that ended just before `cast`."""
        if not self._pending:
            return
        inside_word = is_wordlike(cast) and is_wordlike(self._left)
        ready = () if inside_word else sorted(self._pending)
        self._pending.clear()
        for start, rule in ready:
            yield Match(self._rules.rules[rule], start)
