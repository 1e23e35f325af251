r"""Bounded patterns: the small part of regular expressions that a streaming checker can promise to finish.

A pattern is read into the automaton of its character positions (Glushkov's construction), which has no
backtracking: checking costs at most (positions alive) per character, and at any moment it is known which
suffix of a text could still begin a match. Understood are: literals, `.`, `\w`, `\d`, `\s`, classes
`[a-z]` and `[^a-z]`, groups, `|`, `?`, `{m}` and `{m,n}`. Repeats without a bound, back references and
look-around are refused. Literals are folded like the text they are compared with (`actors.shadow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import field, frozen

from actors.shadow import fold

MAX_POSITIONS = 4096
"""Character positions of one pattern after its repeats are written out."""


class PatternError(ValueError):
    """A pattern that cannot be used; the text says where it is wrong and what is allowed."""


@frozen
class Chars:
    """One position's set of shadow characters."""

    members: frozenset[str] = frozenset()
    tests: tuple[Callable[[str], bool], ...] = ()
    negated: bool = False

    @property
    def is_plain(self) -> bool:
        """Say whether `members` says it all."""
        return not self.tests and not self.negated

    def __contains__(self, char: object) -> bool:
        if not isinstance(char, str):
            return False
        found = char in self.members or any(test(char) for test in self.tests)
        return found != self.negated


@frozen
class Automaton:
    """Positions 0..n-1 of a pattern: where a match may begin and end, and what may follow what."""

    chars: tuple[Chars, ...]
    first: frozenset[int]
    last: frozenset[int]
    follow: tuple[frozenset[int], ...]
    longest: int
    """Shadow characters of the longest match."""


@frozen
class _Node:
    """A piece under construction; positions are numbers of the builder."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    empty: bool = True
    longest: int = 0


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_ESCAPES: dict[str, Chars] = {
    "w": Chars(tests=(_is_word,)),
    "d": Chars(tests=(str.isdigit,)),
    "s": Chars(members=frozenset(" ")),
}


def literal(phrase: str) -> Automaton:
    """Return the automaton of a phrase, in any case it may be written in."""
    builder = _Builder()
    spellings = {_spelling(s) for s in (phrase, phrase.lower(), phrase.upper(), phrase.title())}
    return builder.finish(builder.either([builder.text(s) for s in sorted(spellings)]), phrase)


def parse(pattern: str) -> Automaton:
    """Return the automaton of a pattern. Raises `PatternError`."""
    return _Parser(pattern).parse()


def _spelling(phrase: str) -> str:
    return " ".join("".join(map(fold, phrase)).split())


@frozen
class _Builder:
    chars: list[Chars] = field(factory=list)
    follow: list[set[int]] = field(factory=list)

    def one(self, chars: Chars) -> _Node:
        if len(self.chars) >= MAX_POSITIONS:
            raise PatternError(f"a pattern may have at most {MAX_POSITIONS} positions: shorten its repeats")
        self.chars.append(chars)
        self.follow.append(set())
        here = frozenset({len(self.chars) - 1})
        return _Node(here, here, False, 1)

    def text(self, folded: str) -> _Node:
        node = _Node()
        for char in folded:
            node = self.then(node, self.one(Chars(frozenset(char))))
        return node

    def then(self, left: _Node, right: _Node) -> _Node:
        for position in left.last:
            self.follow[position] |= right.first
        return _Node(
            left.first | right.first if left.empty else left.first,
            left.last | right.last if right.empty else right.last,
            left.empty and right.empty,
            left.longest + right.longest,
        )

    def either(self, nodes: list[_Node]) -> _Node:
        return _Node(
            frozenset().union(*(n.first for n in nodes)),
            frozenset().union(*(n.last for n in nodes)),
            any(n.empty for n in nodes),
            max(n.longest for n in nodes),
        )

    def finish(self, node: _Node, pattern: str) -> Automaton:
        if node.empty:
            raise PatternError(f"{pattern!r} matches the empty text: it would block everything")
        if any(" " in self.chars[p] for p in node.first):
            raise PatternError(f"{pattern!r} could begin with a space: begin with what must be there")
        return Automaton(
            tuple(self.chars), node.first, node.last, tuple(map(frozenset, self.follow)), node.longest
        )


class _Parser:
    """Recursive descent over the pattern; `repeat` parses an atom again for each copy of it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._builder = _Builder()

    def parse(self) -> Automaton:
        node = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("a closing parenthesis without an opening one")
        return self._builder.finish(node, self._pattern)

    def _alternatives(self) -> _Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return self._builder.either(nodes)

    def _sequence(self) -> _Node:
        node = _Node()
        while self._peek() not in ("", "|", ")"):
            node = self._builder.then(node, self._repeated())
        return node

    def _repeated(self) -> _Node:
        begin = self._at
        node = self._atom()
        end = self._at
        least, most = self._bounds()
        after = self._at
        if (least, most) == (1, 1):
            return node
        if most == 0:
            raise self._error("a repeat of zero times")
        total = self._optional(node) if least == 0 else node
        for copy in range(1, most):
            self._at = begin
            again = self._atom()
            if self._at != end:
                raise self._error("a repeat that cannot be read twice")
            total = self._builder.then(total, self._optional(again) if copy >= least else again)
        self._at = after
        return total

    def _optional(self, node: _Node) -> _Node:
        return _Node(node.first, node.last, True, node.longest)

    def _bounds(self) -> tuple[int, int]:
        if self._take("?"):
            return 0, 1
        if self._peek() in ("*", "+") and self._peek():
            raise self._error(f"{self._peek()!r} has no bound: write {{0,20}} or {{1,20}}")
        if not self._take("{"):
            return 1, 1
        body = self._until("}")
        low, comma, high = body.partition(",")
        if not low.isdecimal() or (comma and not high.isdecimal()):
            raise self._error(f"{{{body}}} is no bounded repeat: write {{2}} or {{0,20}}")
        least, most = int(low), int(high) if comma else int(low)
        if most < least or most > MAX_POSITIONS:
            raise self._error(f"{{{body}}} must rise, and stay under {MAX_POSITIONS}")
        return least, most

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._builder.one(self._class())
        if char == ".":
            return self._builder.one(Chars(negated=True))
        if char == "\\":
            return self._escape(self._next())
        if char in "*+?{})]^$":
            raise self._error(f"{char!r} stands for itself only as \\{char}")
        return self._folded(char)

    def _group(self) -> _Node:
        if self._take("?") and not self._take(":"):
            raise self._error("only (…) and (?:…) are groups here")
        node = self._alternatives()
        if not self._take(")"):
            raise self._error("a parenthesis that is not closed")
        return node

    def _escape(self, char: str) -> _Node:
        if char in _ESCAPES:
            return self._builder.one(_ESCAPES[char])
        if char.isalnum():
            raise self._error(f"\\{char} is not known: there are \\w, \\d and \\s")
        return self._folded(char)

    def _folded(self, char: str) -> _Node:
        cast = fold(char)
        if not cast:
            raise self._error(f"{char!r} leaves no shadow, so nothing can match it")
        return self._builder.text(cast)

    def _class(self) -> Chars:
        negated = self._take("^")
        members: set[str] = set()
        tests: list[Callable[[str], bool]] = []
        for low, high in self._class_items():
            if low.startswith("\\") and low[1:] in _ESCAPES:
                members |= _ESCAPES[low[1:]].members
                tests += _ESCAPES[low[1:]].tests
                continue
            members |= {self._single(chr(p)) for p in range(ord(low[-1]), ord(high[-1]) + 1)}
        if not members and not tests:
            raise self._error("an empty class")
        return Chars(frozenset(members), tuple(tests), negated)

    def _class_items(self) -> Iterator[tuple[str, str]]:
        while not self._take("]"):
            low = self._class_char()
            high = low
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._next()
                high = self._class_char()
                if high[-1] < low[-1]:
                    raise self._error(f"the range {low}-{high} falls")
            yield low, high

    def _class_char(self) -> str:
        char = self._next()
        return char + self._next() if char == "\\" else char

    def _single(self, char: str) -> str:
        cast = fold(char)
        if len(cast) != 1:
            raise self._error(f"{char!r} in a class must cast one shadow character, not {cast!r}")
        return cast

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise self._error("the pattern ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _until(self, char: str) -> str:
        end = self._pattern.find(char, self._at)
        if end < 0:
            raise self._error(f"{char!r} is missing")
        body, self._at = self._pattern[self._at : end], end + 1
        return body

    def _error(self, what: str) -> PatternError:
        return PatternError(f"pattern {self._pattern!r} at {self._at}: {what}")
