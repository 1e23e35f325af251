"""Asking the catalog: an answer in time, or the normal path. Nothing here can slow or fail a turn."""

from __future__ import annotations

from typing import TypeGuard
from zlib import crc32

import trio

from actors.protocol import Declined, Hit, Lookup, OpenTurn
from actors.turn_host import Host
from store.answer import DamagedAnswer
from supervision.errors import AskFailed

PROBE_WITHIN = 5.0
"""Seconds a probe may take: nobody waits for it."""


async def look_up(host: Host, opening: OpenTurn) -> Hit | None:
    """Return the catalog's answer to a first question, if there is one in time."""
    question = next((m.content for m in reversed(opening.messages) if m.role == "user"), "")
    message = Lookup(opening.request_id, opening.owner, question)
    replica, probes = host.breakers.choose(_replicas(host, opening.request_id), trio.current_time())
    for probe in probes:
        host.context.nursery.start_soon(_probe, host, probe, message)
    if replica is None:
        return None
    reply = await _ask(host, replica, message, host.settings.fast_answer_within)
    return reply if isinstance(reply, Hit) else None


def _replicas(host: Host, request_id: str) -> list[tuple[str, int]]:
    tree = host.context.tree
    names = tree.up("fast_answer")
    at = crc32(request_id.encode()) % len(names) if names else 0
    return [(name, tree.epoch(name)) for name in (*names[at:], *names[:at])]


async def _ask(host: Host, replica: tuple[str, int], message: Lookup, within: float) -> Hit | Declined | None:
    name, epoch = replica
    breaker = host.breakers.of(name, epoch)
    try:
        reply = await host.context.ask(name, message, timeout=within, to_epoch=epoch, owner=message.owner)
    except AskFailed:
        host.counters["fast_answer_failures"] += 1
        breaker.failed(trio.current_time())
        return None
    if not _is_whole(reply, message.request_id):
        host.counters["bad_replies"] += 1
        breaker.failed(trio.current_time())
        return None
    breaker.succeeded()
    return reply


def _is_whole(reply: object, request_id: str) -> TypeGuard[Hit | Declined]:
    if not isinstance(reply, Hit | Declined) or reply.request_id != request_id:
        return False
    try:
        return not isinstance(reply, Hit) or reply.answer != ""
    except DamagedAnswer:
        return False


async def _probe(host: Host, replica: tuple[str, int], message: Lookup) -> None:
    await _ask(host, replica, message, PROBE_WITHIN)
