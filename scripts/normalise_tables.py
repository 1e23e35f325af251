"""Write `store/normalise_tables.json`: the Unicode facts that `store.normalise` is frozen to.

Run it under Python 3.11 only (Unicode 14.0): `python -m scripts.normalise_tables`. The file is data: running
this again must not change it unless `VERSION` is raised, because every published catalog names its digest.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from functools import cache
from pathlib import Path

VERSION = 1
UNICODE = "14.0.0"
TARGET = Path(__file__).parent.parent / "store" / "normalise_tables.json"
EVERY = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
HANGUL_SYLLABLES = range(0xAC00, 0xD7A4)
HANGUL_JOINING = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]

# Invisible, and never the difference between two questions. Tag characters stay: they spell flags.
IGNORED = {
    0x00AD, 0x034F, 0x061C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0,
    *range(0x180B, 0x1810), *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070),
    *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0),
}  # fmt: skip
SPACES = {
    *range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B),
    0x2028, 0x2029, 0x202F, 0x205F, 0x3000,
}  # fmt: skip
# What keyboards put in by themselves.
TYPED = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2010: "-", 0x2011: "-"}
# NFKC would make 10² into 102. A raised digit keeps its meaning by staying what it is.
RAISED = {0xB2, 0xB3, 0xB9, *range(0x2070, 0x2080)}
STOPS = ".?!\u0589\u061f\u06d4\u0964\u0965\u104a\u104b\u1362\u1367\u3002\u203c\u2047\u2048\u2049"


@cache
def decomposed(char: str) -> str:
    """Full compatibility decomposition of one character, raised digits and Hangul syllables excepted."""
    facts = unicodedata.decomposition(char)
    if not facts or ord(char) in RAISED:
        return char
    parts = facts.split()
    points = parts[1:] if parts[0].startswith("<") else parts
    return "".join(decomposed(chr(int(point, 16))) for point in points)


def mapped(char: str) -> str:
    """One pass over one character: what is typed, ignored or space, else its folded decomposition."""
    point = ord(char)
    if point in TYPED:
        return TYPED[point]
    if point in IGNORED:
        return ""
    return " " if point in SPACES else "".join(decomposed(c) for c in decomposed(char).casefold())


def folded(char: str) -> str:
    """Return the composed end point of `mapped`, reached by repeating it until nothing changes."""
    text, before = mapped(char), None
    while text != before:
        text, before = "".join(mapped(c) for c in text), text
    return unicodedata.normalize("NFC", text)


def composed_pairs() -> list[tuple[str, str, str]]:
    """Every (first, second, composite) of canonical composition, exclusions left out, Hangul left out."""
    pairs = []
    for char in EVERY:
        facts = unicodedata.decomposition(char).split()
        if len(facts) == 2 and not facts[0].startswith("<") and unicodedata.normalize("NFC", char) == char:
            first, second = (chr(int(point, 16)) for point in facts)
            pairs.append((first, second, char))
    return pairs


def ranges(points: list[int]) -> list[list[int]]:
    """Inclusive runs of sorted code points."""
    runs: list[list[int]] = []
    for point in sorted(points):
        if runs and point == runs[-1][1] + 1:
            runs[-1][1] = point
        else:
            runs.append([point, point])
    return runs


def tables() -> dict[str, object]:
    """Everything `store.normalise` reads, in the order it is written."""
    if unicodedata.unidata_version != UNICODE:
        raise SystemExit(
            f"this Python has Unicode {unicodedata.unidata_version}; the tables are made with {UNICODE}"
        )
    plain = [c for c in EVERY if ord(c) not in HANGUL_SYLLABLES]
    pairs = composed_pairs()
    marks = [ord(c) for c in EVERY if unicodedata.combining(c)]
    words = [ord(c) for c in EVERY if unicodedata.category(c)[0] in "LMN" or unicodedata.category(c) == "So"]
    digits = [ord(c) for c in EVERY if unicodedata.category(c)[0] == "N"]
    return {
        "version": VERSION,
        "unicode": UNICODE,
        "stops": "".join(sorted(set("".join(folded(c) for c in STOPS)))),
        "fold": {format(ord(c), "x"): folded(c) for c in plain if folded(c) != c},
        "decompose": {format(ord(c), "x"): decomposed(c) for c in plain if decomposed(c) != c},
        "compose": ["".join(pair) for pair in pairs],
        "combining": {
            format(ord(c), "x"): unicodedata.combining(c) for c in EVERY if unicodedata.combining(c)
        },
        "unsettled": ranges(sorted({*marks, *(ord(pair[1]) for pair in pairs), *HANGUL_JOINING})),
        "word": ranges(words),
        "number": ranges(digits),
    }


def main() -> int:
    """Write the file, one table a line so that a difference can be read."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(table, separators=(',', ':'))}" for name, table in tables().items()
    ]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
