"""What a model without weights says, and what of it a client must see: told without the code under test."""

from __future__ import annotations

import hashlib

from attrs import frozen

from actors.scripted_engine import last_message
from gpu.sequence import Request

CANARY = "forbidden fruit"
POLICY = f"""
name = "canary"

[[rule]]
id = "canary.word"
category = "violence"
phrases = ["{CANARY}"]
"""
QUESTION = "Which release is this?"
ANSWER = "The release that answers at once, in more than one piece of text: " + "ça va, " * 12 + "fin."


class Poisoned(Exception):
    """What a poison request does to its batcher."""


@frozen
class Golden:
    """The text that one choice ends with when nothing breaks it off, why it ends, and its tokens at most."""

    text: str
    reason: str
    tokens: int


def script(request: Request) -> bytes:
    """What the engine says. `<owner>|<name>|<flavour>|<length>` is what it was asked."""
    question = last_message(request.prompt).decode()
    if "|poison|" in question:
        raise Poisoned(question)
    return reply_to(question, request.params.temperature, request.params.seed)


def reply_to(question: str, temperature: float, seed: int) -> bytes:
    """A function of (prompt, seed, position): a word that names its asker, again and again, and a canary."""
    if question == QUESTION:
        return ANSWER.encode()  # the catalog may be away: the model knows it as well
    owner, name, flavour, length = question.split("|")
    words = [f"<{owner}.{name}>"]
    if temperature > 0:
        digest = hashlib.sha256(f"{question}/{seed}".encode()).hexdigest()
        words += [digest[at : at + 5] for at in range(0, 60, 5)]
    else:
        words += ["été", "naïve", "🙂", "plain", "STOP", "here", f"<{owner}>"] * 3
    reply = " ".join(words)[: int(length)]
    return (reply + f" a {CANARY} of " + owner if flavour == "bad" else reply).encode()


def golden(
    question: str, *, temperature: float, seed: int, max_tokens: int, stops: tuple[str, ...], include: bool
) -> Golden:
    """Cut the reply as the request says: by tokens, at a stop string, before a canary."""
    said = reply_to(question, temperature, seed)
    tokens = min(len(said), max_tokens or len(said))
    reason = "length" if max_tokens and tokens == max_tokens else "stop"
    text = said[:tokens].decode(errors="ignore")
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if found:
        end, start = min(found)
        text, reason = text[: end if include else start], "stop"
    if CANARY in text:
        text, reason = text[: text.index(CANARY)], "content_filter"
    return Golden(text, reason, tokens)
