"""From a score to an action, with a randomised slice from which the model can be judged and trained later.

An owner is in the slice or not for as long as the salt stays: the draw is a hash, so it needs no memory and
every replica agrees. In the slice a coin, drawn once per owner and entry, decides instead of the score. What
is logged beside the action is the probability it had before any draw, given the score.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, le

Arm = Literal["policy", "explore"]
COIN = 0.5


@frozen
class Decision:
    """Serve the answer or not; `propensity` is the probability that this action had."""

    serve: bool
    arm: Arm
    propensity: float


SERVE = Decision(serve=True, arm="policy", propensity=1.0)
DECLINE = Decision(serve=False, arm="policy", propensity=1.0)
"""All there is without a slice."""


@frozen
class Policy:
    """Serve at `threshold` and above, save for a share `explore` of owners, who get a coin's word."""

    threshold: float
    explore: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    salt: str = ""

    def decide(self, score: float, owner: str, entry: str) -> Decision:
        """Decide for one owner and one entry. Pure: the same arguments give the same decision."""
        serve: bool = score >= self.threshold
        if not self.explore:
            return SERVE if serve else DECLINE
        arm: Arm = "policy"
        if self._draw("slice", owner, "") < self.explore:
            arm = "explore"
            serve = self._draw("coin", owner, entry) < COIN
        by_score = 1.0 if (score >= self.threshold) is serve else 0.0
        return Decision(serve, arm, (1.0 - self.explore) * by_score + self.explore * COIN)

    def _draw(self, use: str, owner: str, entry: str) -> float:
        """Uniform in [0, 1)."""
        text = f"{self.salt}\0{use}\0{owner}\0{entry}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) / (1 << 56)
