"""`POST /v1/moderations`: the safety policy's opinion of a text."""

from __future__ import annotations

from typing import Any

from actors.edge import request_ids
from actors.edge.errors import internal, invalid, model_not_found, overloaded, shown
from actors.edge.validation import Fields
from actors.protocol import CATEGORIES, Moderate, Moderated
from supervision.actor import Context
from supervision.errors import AskFailed

MODEL = "antiphon-policy"
MODELS = (MODEL, "omni-moderation-latest", "text-moderation-latest", "text-moderation-stable")
MAX_INPUTS = 256
MAX_INPUT = 2**20
ASK_SECONDS = 10.0


def parse(body: dict[str, Any]) -> Moderate:
    """Read a moderation's JSON. Raises `ApiError` 400 or 404 that names the field."""
    fields = Fields(body)
    model = fields.text("model", 256)
    if model is not None and model not in MODELS:
        raise model_not_found(model)
    value = fields.take("input")
    fields.done()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise invalid(f"input must be a string or an array of 1 to {MAX_INPUTS} strings.", "input")
    if all(isinstance(item, dict) for item in value):
        return Moderate(("".join(_part(item, f"input[{index}]") for index, item in enumerate(value)),))
    for index, item in enumerate(value):
        if not isinstance(item, str) or len(item) > MAX_INPUT:
            raise invalid(
                f"input[{index}] must be a string of at most {MAX_INPUT} characters.", f"input[{index}]"
            )
    return Moderate(tuple(value))


def _part(part: dict[str, Any], path: str) -> str:
    fields = Fields(part, path)
    kind = fields.take("type")
    if kind != "text":
        raise fields.refuse("type", f"only text is moderated, not {shown(kind)}")
    text = fields.text("text", MAX_INPUT)
    if text is None:
        raise fields.refuse("text", "is missing")
    fields.done()
    return text


async def ask(context: Context, question: Moderate, owner: str) -> Moderated:
    """Have one of the live checkers answer. Raises 503 when none does: no answer is not a pass."""
    for name in (*context.tree.up("safety"), *context.tree.up("safety_fallback")):
        try:
            reply = await context.ask(name, question, timeout=ASK_SECONDS, owner=owner)
        except AskFailed:
            continue
        if not isinstance(reply, Moderated) or len(reply.flagged) != len(question.inputs):
            raise internal()
        return reply
    raise overloaded("No safety checker is up: try again in a moment.")


def render(answer: Moderated) -> dict[str, Any]:
    """Return the reply's JSON. The policy is rules, so a score is 0 or 1."""
    return {
        "id": f"modr-{request_ids.mint('')}",
        "model": f"{MODEL}-{answer.policy[:12]}",
        "results": [_result(frozenset(flagged)) for flagged in answer.flagged],
    }


def _result(flagged: frozenset[str]) -> dict[str, Any]:
    return {
        "flagged": bool(flagged),
        "categories": {name: name in flagged for name in CATEGORIES},
        "category_scores": {name: float(name in flagged) for name in CATEGORIES},
        "category_applied_input_types": {name: ["text"] for name in CATEGORIES},
    }
