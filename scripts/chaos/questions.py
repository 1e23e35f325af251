"""What the clients ask. The golden answers are asked for first, while nothing is broken."""

from __future__ import annotations

import random

from scripts.chaos.plan import Plan
from scripts.chaos.record import Question

TEXTS = (
    "What is the capital of France?",
    "Name the days of the week.",
    "Count from one to twelve in words.",
    "Write two sentences about rain.",
    "Explain what a bridge is for.",
    "List four fruits and say what colour each has.",
    "Tell me a short story about a cat.",
    "Say something in Russian, and something with an emoji.",
)
DISTINCT = 12
"""Questions asked at all: each is asked many times, and must get the same answer every time."""


def draw(plan: Plan, owner: int, rng: random.Random) -> list[Question]:
    """Return the questions of one owner. Each carries the owner's canary, which must never reach another."""
    questions = []
    for number in range(DISTINCT):
        seed = rng.randrange(1 << 31) if rng.random() < plan.seeded else None
        text = f"{TEXTS[number % len(TEXTS)]} (my word is canary-{owner}-{rng.randrange(10**6)})"
        questions.append(
            Question(
                owner * DISTINCT + number, text, seed, rng.randint(plan.max_tokens // 3, plan.max_tokens)
            )
        )
    return questions
