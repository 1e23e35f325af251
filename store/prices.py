"""What a request costs: whole micro-units, one rounding per request.

A price is in micro-units per million tokens, so a token's cost is a fraction with the denominator
1,000,000. The parts of a request are added as such fractions and the sum is rounded once, half up. A charge
that comes in pieces adds (cost after) - (cost before), so the pieces add up to the cost of the whole in
whatever order they come.
"""

from __future__ import annotations

from attrs import frozen

MILLION = 1_000_000
ANY_MODEL = "*"
"""The model of the price that applies to models without one of their own."""


@frozen
class Price:
    """A model's price list. Tokens: micro-units per million; a fast answer: micro-units each.

    `version` is given by the books, rising from 1; a request keeps the version it began with.
    """

    model: str
    prompt: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    completion: int = 0
    fast_answer: int = 0
    version: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("prompt", "cached", "completion", "fast_answer"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"price of {self.model!r}: {name} must be whole micro-units, not {value!r}")


@frozen
class Use:
    """What a request received. `completion` counts positions of all choices."""

    prompt: int
    cached: int
    completion: int
    is_fast_answer: bool = False


def cost(price: Price, use: Use) -> int:
    """Return the cost of a whole request in micro-units. A fast answer costs its own price and no tokens."""
    if use.is_fast_answer:
        return price.fast_answer
    millionths = (
        (use.prompt - use.cached) * price.prompt
        + use.cached * price.cached
        + use.completion * price.completion
    )
    return (millionths + MILLION // 2) // MILLION
