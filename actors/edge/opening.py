"""From a request that was found good to a turn that is open: its id, its host, and what makes a retry one."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from attrs import frozen
from werkzeug.datastructures import Headers

from actors.edge import hosts, request_ids, tracing
from actors.edge.chat_completions import TurnRequest
from actors.edge.errors import invalid, overloaded
from actors.protocol import OpenTurn
from store.accounts import Identity
from supervision.tree import Tree

MAX_LABEL = 512
MAX_IDEMPOTENCY_KEY = 255
NOT_KEPT = ("user", "safety_identifier")
"""Names of the client's own users: a reply repeats them, but nothing that lasts does."""


@frozen
class Call:
    """What the headers and the body's bytes say, beside the JSON: who asks, and whether he asked before."""

    identity: Identity
    digest: str
    """SHA-256 of the path and the body."""
    idempotency_key: str = ""
    is_retry: bool = False


def read_call(identity: Identity, path: str, body: bytes, headers: Headers) -> Call:
    """Read the headers that make a request a repetition. Raises 400 for ones that are malformed."""
    key = headers.get("idempotency-key", "")
    if len(key) > MAX_IDEMPOTENCY_KEY or not _is_printable(key):
        raise invalid(f"Idempotency-Key must have at most {MAX_IDEMPOTENCY_KEY} printable ASCII characters.")
    retries = headers.get("x-stainless-retry-count", "0")
    if not (retries.isascii() and retries.isdigit() and len(retries) <= 9):
        raise invalid("X-Stainless-Retry-Count must be a whole number.")
    return Call(identity, digest_of(path, body), key, int(retries) > 0)


def digest_of(path: str, body: bytes) -> str:
    """Return what a retry is recognised by."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()


def check_label(headers: Headers) -> None:
    """Check `X-Client-Request-Id`: only a label, so it is held to ASCII and a length, and decides nothing."""
    label = headers.get("x-client-request-id", "")
    if len(label) > MAX_LABEL or not _is_printable(label):
        raise invalid(f"X-Client-Request-Id must have at most {MAX_LABEL} printable ASCII characters.")


def host_of(tree: Tree, call: Call) -> str:
    """Return the session host for a new turn. Raises 503 when the tree has none."""
    key = hosts.key_of(
        conversation="",
        idempotency_key=call.idempotency_key,
        owner=call.identity.account,
        digest=call.digest,
    )
    order = hosts.rendezvous(key, hosts.members(tree))
    if not order:
        raise overloaded("The server is starting: try again in a moment.")
    return order[0]


def open_turn_message(
    call: Call, asked: TurnRequest, host: str, face: Literal["chat", "responses"], deadline: float
) -> OpenTurn:
    """Return the message that opens the turn. Mints its request id."""
    return OpenTurn(
        request_id=request_ids.mint(host),
        owner=call.identity.account,
        key_id=call.identity.key_id,
        model=asked.model.name,
        messages=asked.messages,
        params=asked.params,
        n=asked.n,
        stop=asked.extras.stop,
        include_stop=asked.extras.include_stop,
        stream=asked.stream,
        background=asked.background,
        idempotency_key=call.idempotency_key,
        body_digest=call.digest,
        is_retry=call.is_retry,
        prompt_cache_key=asked.prompt_cache_key,
        fast_answers=call.identity.fast_answers and asked.answerable_at_once,
        deadline=deadline,
        metadata=asked.metadata,
        user=tracing.marks(call.identity.account, asked.end_user),
        face=face,
        store=asked.store,
        echo=_kept(asked.echo),
    )


def _kept(echo: dict[str, Any]) -> str:
    found = {name: value for name, value in echo.items() if name not in NOT_KEPT}
    return json.dumps(found) if found else ""


def _is_printable(text: str) -> bool:
    return text.isascii() and (not text or text.isprintable())
