"""The shadow of a text: what a checker compares, while the user's own text stays as it was.

Each code point has a shadow of its own, whatever stands beside it, so that a text cut anywhere has the same
shadow as the whole, and every shadow character knows the code point that cast it. A code point is
compatibility-decomposed, look-alikes become Latin letters, case is folded, and what is laid over letters
(accents, strokes) or cannot be seen (joiners, soft hyphens, direction marks) casts none. White space casts
a space. Matching is therefore deaf to accents; that is meant.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TypeVar

from attrs import frozen

T = TypeVar("T")

VERSION = "1"
"""Raised whenever the shadow of any code point changes; part of a policy's digest."""
TABLES = unicodedata.unidata_version
"""The Unicode tables of this interpreter, part of the digest too."""

_VISIBLE_FORMAT = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u08e2\U000110bd")
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2065\u3164\uffa0")
_KEPT_MARKS = frozenset({0, 7, 8, 9, 84, 91, 103, 107, 118, 122, 129, 130, 132})
"""Combining classes that spell (Indic, Thai, Lao, Tibetan, kana voicing); the others only decorate."""

# Greek capitals stand for the Latin ones they are drawn like, small letters for the small ones.
# fmt: off
_LOOKALIKES = {
    # Cyrillic
    "\u0405": "s", "\u0406": "i", "\u0408": "j", "\u0410": "a", "\u0412": "b", "\u0415": "e",
    "\u041a": "k", "\u041c": "m", "\u041d": "h", "\u041e": "o", "\u0420": "p", "\u0421": "c",
    "\u0422": "t", "\u0423": "y", "\u0425": "x", "\u0430": "a", "\u0432": "b", "\u0433": "r",
    "\u0435": "e", "\u043a": "k", "\u043c": "m", "\u043d": "h", "\u043e": "o", "\u0440": "p",
    "\u0441": "c", "\u0442": "t", "\u0443": "y", "\u0445": "x", "\u044c": "b", "\u0455": "s",
    "\u0456": "i", "\u0458": "j", "\u04ae": "y", "\u04af": "y", "\u04bb": "h", "\u0501": "d",
    "\u050c": "g", "\u051b": "q", "\u051d": "w",
    # Greek
    "\u0391": "a", "\u0392": "b", "\u0395": "e", "\u0396": "z", "\u0397": "h", "\u0399": "i",
    "\u039a": "k", "\u039c": "m", "\u039d": "n", "\u039f": "o", "\u03a1": "p", "\u03a4": "t",
    "\u03a5": "y", "\u03a7": "x", "\u03b1": "a", "\u03b5": "e", "\u03b7": "n", "\u03b9": "i",
    "\u03ba": "k", "\u03bd": "v", "\u03bf": "o", "\u03c1": "p", "\u03c4": "t", "\u03c5": "u",
    "\u03c7": "x",
    # Latin
    "\u00d8": "o", "\u00f8": "o", "\u0131": "i", "\u0141": "l", "\u0142": "l", "\u0251": "a",
    "\u0261": "g",
}
# fmt: on


@frozen
class Shadow:
    """`text[i]` was cast by code point `source[i]` of the original. `source` never falls."""

    text: str
    source: tuple[int, ...]


def shadow_of(text: str) -> Shadow:
    """Return the whole shadow of `text`; white space in a row casts a single space."""
    chars: list[str] = []
    source: list[int] = []
    for index, char in enumerate(text):
        for cast in fold(char):
            if cast == " " and chars and chars[-1] == " ":
                continue
            chars.append(cast)
            source.append(index)
    return Shadow("".join(chars), tuple(source))


def fold(char: str) -> str:
    """Return the shadow of one code point: "" when it casts none, several characters for a ligature."""
    return SHADOWS[char]


def is_wordlike(cast: str) -> bool:
    """Say whether a shadow character continues a word of a script that puts spaces between words."""
    if not cast or not (cast.isalnum() or cast == "_" or unicodedata.category(cast)[0] == "M"):
        return False
    return not _runs_on(ord(cast))


def _runs_on(point: int) -> bool:
    """Scripts without spaces between words (Thai, Khmer, Chinese, Japanese), and Korean: particles cling."""
    return (
        0x0E00 <= point <= 0x0EFF
        or 0x1000 <= point <= 0x11FF
        or 0x1780 <= point <= 0x17FF
        or 0x3040 <= point <= 0x9FFF
        or 0xA960 <= point <= 0xA97F
        or 0xAC00 <= point <= 0xD7FF
        or 0xF900 <= point <= 0xFAFF
        or 0x20000 <= point <= 0x3FFFF
    )


def _cast(char: str) -> str:
    if char.isspace() or char == "\u2800":
        return " "
    decomposed = unicodedata.normalize("NFKD", char)
    if any(piece.isspace() for piece in decomposed):
        decomposed = decomposed.strip() or " "
    latin = "".join(_LOOKALIKES.get(piece, piece) for piece in decomposed)
    folded = unicodedata.normalize("NFKD", latin.casefold())
    return "".join(_LOOKALIKES.get(piece, piece) for piece in folded if _is_seen(piece)).casefold()


def _is_seen(char: str) -> bool:
    if char in _UNSEEN or 0xFE00 <= ord(char) <= 0xFE0F or 0xE0000 <= ord(char) <= 0xE0FFF:
        return False
    category = unicodedata.category(char)
    if category in ("Cf", "Cc", "Cs"):
        return char in _VISIBLE_FORMAT
    return category not in ("Mn", "Me") or (category == "Mn" and unicodedata.combining(char) in _KEPT_MARKS)


class Table(dict[str, T]):
    """A function of single characters, remembered: at most one entry for each of Unicode's 1.1 million."""

    def __init__(self, function: Callable[[str], T]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, char: str) -> T:
        value = self._function(char)
        self[char] = value
        return value


SHADOWS = Table(_cast)
"""`fold`, for loops over many characters."""
WORDLIKE = Table(is_wordlike)
"""`is_wordlike`, likewise."""
