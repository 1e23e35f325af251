"""The checker: reads text against a policy and answers Allow or Block, never anything else.

It keeps nothing between messages, so any replica may answer any `Screen`, and a verdict asked for again is
the same. What it cannot decide it does not answer: an exception ends the incarnation, the asker gets
`ActorDown`, and no text passes. The same class is `safety.0…n` and `safety_fallback`; their settings name
the policy.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import trio
from attrs import frozen

from actors import safety_policy
from actors.protocol import Allow, Block, Metrics, Moderate, Moderated, ReadMetrics, Screen, Screened
from actors.safety_policy import DEFAULT_POLICY, Policy
from actors.safety_scan import all_matches, first_match
from supervision.actor import LATER, Actor, Sender

LONG_TEXT = 4096
"""Characters (about 2 ms of scanning) above which a text is read in a thread: short ones do not wait."""


@frozen
class SafetySettings:
    """`policy` is the path of a TOML file (`actors.safety_policy`); "" is the one in the package."""

    policy: str = ""


class Safety(Actor):
    """Answers `Screen` with `Screened` and `Moderate` with `Moderated`.

    Raises `PolicyError` at start when the policy cannot be used: no policy, no checker, no text.
    """

    Settings: ClassVar[type] = SafetySettings

    def __init__(self, settings: SafetySettings) -> None:
        self._path = Path(settings.policy) if settings.policy else DEFAULT_POLICY
        self._policy: Policy
        self._verdicts: Counter[tuple[str, str, str]] = Counter()

    async def on_start(self) -> None:
        """Read the policy."""
        self._policy = await trio.to_thread.run_sync(safety_policy.load, self._path)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Screen, moderate, or report figures."""
        match message:
            case Screen() if len(message.text) <= LONG_TEXT:
                return self._count(screen(self._policy, message, self.context.name))
            case Screen():
                self.context.nursery.start_soon(self._screen_long, message, sender)
                return LATER
            case Moderate():
                self.context.nursery.start_soon(self._moderate, message, sender)
                return LATER
            case ReadMetrics():
                return Metrics(self._metrics())
        return None

    async def _screen_long(self, message: Screen, sender: Sender) -> None:
        screened = await trio.to_thread.run_sync(screen, self._policy, message, self.context.name)
        await self.context.reply(sender, self._count(screened))

    async def _moderate(self, message: Moderate, sender: Sender) -> None:
        await self.context.reply(sender, await trio.to_thread.run_sync(moderate, self._policy, message))

    def _count(self, screened: Screened) -> Screened:
        verdict = screened.verdict
        category = verdict.category if isinstance(verdict, Block) else ""
        self._verdicts[verdict.direction, "block" if category else "allow", category] += 1
        return screened

    def _metrics(self) -> tuple[str, ...]:
        name = self.context.name
        counts = [
            "antiphon_safety_verdicts_total"
            f'{{actor="{name}",direction="{d}",verdict="{v}",category="{c}"}} {count}'
            for (d, v, c), count in sorted(self._verdicts.items())
        ]
        policy = self._policy
        info = (
            f'antiphon_safety_policy_info{{actor="{name}",policy="{policy.name}",digest="{policy.digest}"}} 1'
        )
        return (*counts, info)


def screen(policy: Policy, message: Screen, checker: str) -> Screened:
    """Return the verdict on a piece of text: a pure function, independent of how the text was cut."""
    found = first_match(policy.for_direction(message.direction), message.text, message.context, message.final)
    about = (message.request_id, message.direction, message.choice)
    if isinstance(found, int):
        return Screened(Allow(*about, message.start + found, checker, policy.digest))
    category, rule = found.rule.category, found.rule.id
    return Screened(Block(*about, category, rule, checker, policy.digest, message.start + found.start))


def moderate(policy: Policy, message: Moderate) -> Moderated:
    """Return the categories of every rule that matches, input by input,, sorted."""
    flagged = []
    for text in message.inputs:
        found = {match.rule.category for match in all_matches(policy.every, text)}
        flagged.append(tuple(sorted(found)))
    return Moderated(tuple(flagged), policy.digest)
