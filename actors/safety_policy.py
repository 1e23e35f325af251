"""A safety policy: rules read from TOML, and the automaton made of them.

A policy file has a `name` and `[[rule]]` tables:

    id          a name for logs and verdicts, unique in the file
    category    one of `CATEGORIES`
    direction   "input", "output" or "both" (the default)
    phrases     literal phrases; case, accents, look-alikes and spacing do not matter
    patterns    bounded patterns (`actors.safety_pattern`)
    max_length  shadow characters a pattern's match may have; needed with `patterns`
    word        match whole words only (true by default)
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal

import cattrs
from attrs import field, frozen
from cattrs import transform_error
from cattrs.errors import ClassValidationError
from cattrs.gen import make_dict_structure_fn
from cattrs.v import format_exception

from actors import shadow
from actors.protocol import CATEGORIES, Direction
from actors.safety_pattern import Automaton, PatternError, literal, parse
from actors.shadow import Table

DEFAULT_POLICY = Path(__file__).with_name("default_policy.toml")
MAX_MATCH = 1024
"""Longest match any rule may have: bounds what a stream can be held back for."""


class PolicyError(ValueError):
    """A policy file that cannot be used; the text names the file, the rule and what is allowed."""


@frozen
class Rule:
    """One rule as the file has it."""

    id: str
    category: str
    direction: Literal["input", "output", "both"] = "both"
    phrases: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    max_length: int = 0
    word: bool = True

    def applies(self, direction: Direction) -> bool:
        """Say whether the rule is for this direction."""
        return self.direction in ("both", direction)


@frozen
class _File:
    name: str
    rule: tuple[Rule, ...] = ()


@frozen
class RuleSet:
    """The rules of one direction as a single automaton.

    `owner[p]` is the rule of position p. Positions whose match needs word boundaries are found by
    `rules[owner[p]].word`.
    """

    rules: tuple[Rule, ...]
    chars: tuple[Container[str], ...] = ()
    first: tuple[int, ...] = ()
    last: frozenset[int] = frozenset()
    follow: tuple[tuple[int, ...], ...] = ()
    owner: tuple[int, ...] = ()
    starts: Table[tuple[int, ...]] = field(init=False, eq=False, repr=False)
    """The positions at which a character can begin a match."""

    @starts.default
    def _starts(self) -> Table[tuple[int, ...]]:
        return Table(lambda char: tuple(p for p in self.first if char in self.chars[p]))

    starts_inside: Table[tuple[int, ...]] = field(init=False, eq=False, repr=False)
    """The same inside a word: those of rules that do not ask for whole words."""

    @starts_inside.default
    def _starts_inside(self) -> Table[tuple[int, ...]]:
        loose = {p for p in self.first if not self.rules[self.owner[p]].word}
        return Table(lambda char: tuple(p for p in self.starts[char] if p in loose))


@frozen
class Policy:
    """A policy ready for use. `digest` names its rules and the shadow they are matched on."""

    name: str
    digest: str
    rules: tuple[Rule, ...]
    input: RuleSet
    output: RuleSet
    every: RuleSet
    """All rules whatever their direction: what moderation looks for."""

    def for_direction(self, direction: Direction) -> RuleSet:
        """Return the rules that look at texts going in, or coming out."""
        return self.input if direction == "input" else self.output


def load(path: Path) -> Policy:
    """Read a policy file. Raises `PolicyError`."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"the policy {path} is not UTF-8: {error}") from error
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


def read(text: str) -> Policy:
    """Make a policy of TOML text. Raises `PolicyError`."""
    try:
        found = _CONVERTER.structure(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"not TOML: {error}") from error
    except ClassValidationError as error:
        raise PolicyError("; ".join(transform_error(error, "policy", _explain))) from error
    _check(found.rule)
    return Policy(
        found.name,
        _digest(found),
        found.rule,
        _compile([r for r in found.rule if r.applies("input")]),
        _compile([r for r in found.rule if r.applies("output")]),
        _compile(found.rule),
    )


def _check(rules: Sequence[Rule]) -> None:
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            raise PolicyError(f"rule {rule.id!r} is there twice")
        seen.add(rule.id)
        if rule.category not in CATEGORIES:
            raise PolicyError(
                f"rule {rule.id!r}: no category {rule.category!r}; there are {', '.join(CATEGORIES)}"
            )
        if not rule.phrases and not rule.patterns:
            raise PolicyError(f"rule {rule.id!r} has neither phrases nor patterns")
        if rule.patterns and not 0 < rule.max_length <= MAX_MATCH:
            raise PolicyError(f"rule {rule.id!r}: patterns need a max_length of 1 to {MAX_MATCH}")


def _compile(rules: Sequence[Rule]) -> RuleSet:
    chars: list[Container[str]] = []
    first: list[int] = []
    last: list[int] = []
    follow: list[tuple[int, ...]] = []
    owner: list[int] = []
    for index, rule in enumerate(rules):
        for automaton in _automata(rule):
            base = len(chars)
            chars += (c.members if c.is_plain else c for c in automaton.chars)
            first += sorted(base + p for p in automaton.first)
            last += [base + p for p in automaton.last]
            follow += [tuple(sorted(base + q for q in after)) for after in automaton.follow]
            owner += [index] * len(automaton.chars)
    return RuleSet(tuple(rules), tuple(chars), tuple(first), frozenset(last), tuple(follow), tuple(owner))


def _automata(rule: Rule) -> list[Automaton]:
    try:
        phrases = [literal(phrase) for phrase in rule.phrases]
        patterns = [parse(pattern) for pattern in rule.patterns]
    except PatternError as error:
        raise PolicyError(f"rule {rule.id!r}: {error}") from error
    for text, automaton in zip(rule.patterns, patterns, strict=True):
        if automaton.longest > rule.max_length:
            raise PolicyError(
                f"rule {rule.id!r}: {text!r} can match {automaton.longest} characters,"
                f" max_length is {rule.max_length}: bound its repeats, or raise max_length"
            )
    for phrase, automaton in zip(rule.phrases, phrases, strict=True):
        if automaton.longest > MAX_MATCH:
            raise PolicyError(f"rule {rule.id!r}: a phrase of over {MAX_MATCH} characters: {phrase[:40]!r}…")
    return phrases + patterns


def _digest(file: _File) -> str:
    text = repr((shadow.VERSION, shadow.TABLES, file))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _explain(error: BaseException, wanted: type | None) -> str:
    return str(error) if type(error) is ValueError else format_exception(error, wanted)


def _strict(wanted: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not wanted:
            raise ValueError(f"wanted {wanted.__name__}, not {value!r}")
        return value

    return structure


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for wanted in (str, int, bool):
        converter.register_structure_hook(wanted, _strict(wanted))
    converter.register_structure_hook_func(lambda wanted: wanted == tuple[str, ...], _strings)
    for cls in (Rule, _File):
        hook: Any = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
        converter.register_structure_hook(cls, hook)
    return converter


def _strings(value: Any, _: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"wanted a list of strings, not {value!r}")
    return tuple(value)


_CONVERTER = _converter()
