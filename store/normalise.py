"""One question, one key: the normal form under which a question is looked up.

Builders and servers must agree on it to the byte, whatever Python they run, so every Unicode fact comes from
`normalise_tables.json` (Unicode 14.0) and none from `unicodedata`. `NORMALISER` names the algorithm and the
tables; a release carries its digest, and a process with another one refuses the release.

The form, in order: compatibility composition and case folding (NFKC casefold), with raised digits left as
they are (10² is not 102); zero-width characters, bidi controls and variation selectors dropped; typographic
quotes and hyphens made plain; runs of white space made one space; sentence punctuation at the end dropped
where it is only punctuation. When in doubt a character stays: a key too many is a miss, a key too few a
wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from attrs import frozen

ALGORITHM = 1
"""Raise it with any change of this file that changes a key."""
LONGEST_TEXT = 2048
"""Characters. Longer text is no common question and is not worth normalising."""
LONGEST_KEY = 511
"""Bytes: LMDB's limit."""

TABLES_FILE = Path(__file__).parent / "normalise_tables.json"
HANGUL_BASE, LEAD_BASE, VOWEL_BASE, TAIL_BASE = 0xAC00, 0x1100, 0x1161, 0x11A7
LEADS, VOWELS, TAILS = 19, 21, 28


@frozen
class Normaliser:
    """Which normal form this is. Two with the same digest give every text the same key."""

    version: str
    digest: str
    """SHA-256 hex over the algorithm's number and the tables' bytes."""


def _character_class(runs: list[list[int]]) -> str:
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in runs)


def _by_point(table: dict[str, Any]) -> dict[int, Any]:
    return {int(point, 16): value for point, value in table.items()}


_RAW = TABLES_FILE.read_bytes()
TABLES: dict[str, Any] = json.loads(_RAW)
"""What is left of the file: the tables below are taken out of it."""
NORMALISER = Normaliser(
    version=f"{ALGORITHM}.{TABLES['version']}",
    digest=hashlib.sha256(b"antiphon normalise %d\n" % ALGORITHM + _RAW).hexdigest(),
)
FOLD: dict[int, str] = _by_point(TABLES.pop("fold"))
STOPS: str = TABLES["stops"]
UNSETTLED: list[list[int]] = TABLES["unsettled"]
"""Code points whose place depends on their neighbours: only text with one needs reordering and composing."""
_DECOMPOSE: dict[int, str] = _by_point(TABLES.pop("decompose"))
_COMBINING: dict[int, int] = _by_point(TABLES.pop("combining"))
_COMPOSE: dict[tuple[str, str], str] = {(pair[0], pair[1]): pair[2] for pair in TABLES.pop("compose")}
_unsettled = re.compile(f"[{_character_class(UNSETTLED)}]").search
_has_word = re.compile(f"[{_character_class(TABLES['word'])}]").search
_spaces = re.compile(" {2,}")
_spoken = re.compile(
    f"(?:(?![{_character_class(TABLES['number'])}])[{_character_class(TABLES['word'])}'-]){{2,}}"
)
_ASCII_SPACES = dict.fromkeys(range(0x09, 0x0E), " ")


def normalise(text: str) -> str:
    """Return the normal form of a text. Pure, total and idempotent; lone surrogates pass through."""
    if not text.isascii():
        return _trimmed(fold(text))
    return _trimmed(text.lower() if text.isprintable() else text.lower().translate(_ASCII_SPACES))


def key_of(text: str) -> bytes | None:
    """Return the catalog key of a text, or None where there can be none.

    None for a text of more than `LONGEST_TEXT` characters, for a key that is empty or of more than
    `LONGEST_KEY` bytes, and for text with NUL or a lone surrogate in it.
    """
    if len(text) > LONGEST_TEXT:
        return None
    if text.isascii() and text.isprintable():
        key = _trimmed(text.lower()).encode()
    else:
        try:
            key = normalise(text).encode()
        except UnicodeEncodeError:
            return None
        if b"\0" in key:
            return None
    return key if 0 < len(key) <= LONGEST_KEY else None


def _trimmed(text: str) -> str:
    """Join white space, and drop what surrounds the question."""
    if "  " in text:
        text = _spaces.sub(" ", text)
    text = text.strip(" ")
    last = text[-1:]
    if last == "?" and text[-2:-1].isalnum() and text[-2].isascii():
        return text[:-1]  # by far the commonest end, and what the rest would come to
    return _without_stops(text) if last and last in STOPS else text


def fold(text: str) -> str:
    """Fold, compose and clean characters, before white space and stops are looked at.

    A fold of each character by itself gives the composed form already, unless a character is left that
    reorders or joins with its neighbours.
    """
    folded = text.translate(FOLD)
    if folded.isascii() or _unsettled(folded) is None:
        return folded
    decomposed = _reordered(text.translate(_DECOMPOSE)).translate(FOLD)
    return _composed(_reordered(decomposed.translate(_DECOMPOSE)))


def _reordered(text: str) -> str:
    """Canonical ordering: runs of combining marks sorted by class, stably."""
    chars = list(text)
    start = 0
    for index, char in enumerate([*chars, ""]):
        if char and ord(char) in _COMBINING:
            continue
        if index - start > 1:
            chars[start:index] = sorted(chars[start:index], key=lambda c: _COMBINING[ord(c)])
        start = index + 1
    return "".join(chars)


def _composed(text: str) -> str:
    """Canonical composition (Unicode Standard, section 3.11, D117), Hangul by arithmetic."""
    out: list[str] = []
    starter, last_class = -1, 0
    for char in text:
        mark = _COMBINING.get(ord(char), 0)
        if starter >= 0 and (last_class < mark or (last_class == 0 and starter == len(out) - 1)):
            joined = _pair(out[starter], char)
            if joined is not None:
                out[starter] = joined
                continue
        out.append(char)
        last_class = mark
        if mark == 0:
            starter = len(out) - 1
    return "".join(out)


def _pair(first: str, second: str) -> str | None:
    lead, vowel = ord(first) - LEAD_BASE, ord(second) - VOWEL_BASE
    if 0 <= lead < LEADS and 0 <= vowel < VOWELS:
        return chr(HANGUL_BASE + (lead * VOWELS + vowel) * TAILS)
    syllable, tail = ord(first) - HANGUL_BASE, ord(second) - TAIL_BASE
    if 0 <= syllable < LEADS * VOWELS * TAILS and syllable % TAILS == 0 and 0 < tail < TAILS:
        return chr(ord(first) + tail)
    return _COMPOSE.get((first, second))


def _is_worded(token: str) -> bool:
    return (token.isascii() and token.isalnum()) or _has_word(token) is not None


def _without_stops(text: str) -> str:
    """Drop the sentence punctuation that ends the last word, unless it is part of what is asked about.

    A last token without a letter or digit stays whole ("what is $?", "what is !"), and so do exclamation
    marks after anything but a spoken word ("what is 5!", "what does :q! do").
    """
    body = text.rstrip(STOPS)
    token = body[body.rfind(" ") + 1 :]
    if not _is_worded(token):
        return text
    run = text[len(body) :]
    if run[0] == "!" and _spoken.fullmatch(token) is None:
        return body + run[: len(run) - len(run.lstrip("!"))]
    return body
