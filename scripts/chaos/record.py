"""What each client saw of each turn: the evidence that the invariants are checked on."""

from __future__ import annotations

from attrs import define, field, frozen


@frozen
class Question:
    """One thing that is asked, always with the same golden answer."""

    number: int
    text: str
    seed: int | None
    """None is greedy."""
    max_tokens: int

    def body(self) -> dict[str, object]:
        """Return the chat request, less what a client kind adds."""
        sampling: dict[str, object] = (
            {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        )
        return {
            "model": "default",
            "messages": [{"role": "user", "content": self.text}],
            "max_completion_tokens": self.max_tokens,
            **sampling,
        }


@define
class Evidence:
    """One turn as its client lived it. `attempts` holds the text seen on each connection, in order."""

    client: str
    question: Question
    owner: int
    attempts: list[str] = field(factory=list)
    outcome: str = ""
    """done | error | abandoned | refused"""
    detail: str = ""
    response_id: str = ""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    seconds: float = 0.0
    ends: int = 0
    """How many times a connection brought the turn's end; each attempt may bring it once."""

    @property
    def text(self) -> str:
        """The text of the last connection."""
        return self.attempts[-1] if self.attempts else ""


@frozen
class Fired:
    """A fault that was really injected, and how long until a good answer came."""

    kind: str
    target: str
    at: float
    recovered: float | None
    detail: str = ""


@frozen
class Violation:
    """An invariant that did not hold: its letter, and what was seen."""

    invariant: str
    what: str
