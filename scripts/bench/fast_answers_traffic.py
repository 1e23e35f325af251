"""Made-up catalogs and questions for `antiphon bench fast-answers`: no question log ships in a package.

The catalog is templates over entities, answers 400 to 4,000 bytes of words drawn by Zipf's law. The traffic:
half asks the catalog by Zipf's law (exponent 1) with noise on its surface, 30 % asks its templates of
entities it does not have, 20 % are questions nobody else asks. Noise, on a third of the questions: other
case, doubled and leading spaces, other final punctuation, full-width letters.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterator

from attrs import frozen

from store.catalog_build import CatalogRow

TEMPLATES = (
    "What is {}?",
    "How does {} work?",
    "Who invented {}?",
    "When was {} first used?",
    "What is {} good for?",
    "How do I learn {}?",
    "What is the difference between {} and its rivals?",
    "Is {} worth the trouble?",
)
SYLLABLES = [c + v for c, v in itertools.product("bdfgklmnprstvz", "aeiou")]
CATALOG_SHARE, NEAR_SHARE = 0.5, 0.3
NOISY = 1 / 3
LEAST_WORDS, MOST_WORDS = 60, 640
WIDE = {ord(c): ord(c) + 0xFEE0 for c in map(chr, range(0x21, 0x7F))}
ANSWERED_ON = dt.date(2026, 3, 1)


def entity(number: int) -> str:
    """Name a thing: three syllables by number, so that any number has one."""
    name = ""
    while True:
        number, digit = divmod(number, len(SYLLABLES))
        name += SYLLABLES[digit]
        if not number and len(name) >= 6:
            return name


def question(number: int) -> str:
    """Return the catalog's question of a rank, 0 the commonest."""
    return TEMPLATES[number % len(TEMPLATES)].format(entity(number // len(TEMPLATES)))


@frozen
class MadeUpRows:
    """A catalog's rows, made when they are read: `where` is the rank. `mark` begins each answer."""

    entries: int
    mark: str = ""

    def __iter__(self) -> Iterator[tuple[int, CatalogRow | str]]:
        """Yield every row."""
        return ((rank, self.read(rank)) for rank in range(self.entries))

    def read(self, where: int) -> CatalogRow:
        """Make a row, the same each time."""
        words = LEAST_WORDS + where * 2_654_435_761 % (MOST_WORDS - LEAST_WORDS)
        start = where * 7919 % (len(PROSE) - 8 * words)
        return CatalogRow(
            question=question(where),
            answer=f"{self.mark}{where}: {PROSE[start : start + 6 * words]}",
            approved_by="bench",
            answered_on=ANSWERED_ON,
            id=f"e{where}",
            uplift=0.1,
            frequency=self.entries // (where + 1),
            feedback=where % 50,
        )


def _prose() -> str:
    draw = random.Random(11)  # noqa: S311 - made-up text, not a secret
    words = [entity(draw.randrange(1 << 20))[: draw.randint(2, 8)] for _ in range(4000)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(words))))
    return " ".join(draw.choices(words, cum_weights=weights, k=200_000))


PROSE = _prose()


def traffic(entries: int, count: int, seed: int) -> list[str]:
    """Return `count` questions as people would send them."""
    draw = random.Random(seed)  # noqa: S311
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(entries)))
    ranks = draw.choices(range(entries), cum_weights=weights, k=count)
    return [_asked(draw, rank, entries) for rank in ranks]


def _asked(draw: random.Random, rank: int, entries: int) -> str:
    kind = draw.random()
    if kind < CATALOG_SHARE:
        text = question(rank)
    elif kind < CATALOG_SHARE + NEAR_SHARE:
        text = question(entries + rank)
    else:
        start = draw.randrange(len(PROSE) - 400)
        text = f"{PROSE[start : start + draw.randint(20, 300)]}?"
    return _noisy(draw, text) if draw.random() < NOISY else text


def _noisy(draw: random.Random, text: str) -> str:
    kind = draw.randrange(5)
    if kind == 0:
        return text.upper() if draw.random() < 0.5 else text.lower()
    if kind == 1:
        return "  " + text.replace(" ", "  ", 1)
    if kind == 2:
        return text.rstrip("?") + draw.choice(("", "??", "?!", "."))
    return text.lower().rstrip("?") if kind == 3 else text.translate(WIDE)
