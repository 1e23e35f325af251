"""Asking the catalog: an answer in time, or the normal path. Nothing here can slow or fail a turn."""

from __future__ import annotations

from typing import TypeGuard
from zlib import crc32

import trio

from actors.protocol import Declined, Hit, Lookup, OpenTurn
from actors.turn_host import Host
from store.answer import DamagedAnswer
from store.breaker import Breaker
from supervision.errors import AskFailed

PROBE_WITHIN = 5.0
"""Seconds a probe may take: nobody waits for it."""


async def look_up(host: Host, opening: OpenTurn) -> Hit | None:
    """Return the catalog's answer to a first question, if there is one in time."""
    question = next((m.content for m in reversed(opening.messages) if m.role == "user"), "")
    replica, probes = host.breakers.choose(_replicas(host, opening.request_id), trio.current_time())
    for probe in probes:
        message = Lookup(opening.request_id, opening.owner, question, is_probe=True)
        host.context.nursery.start_soon(_ask, host, probe, message, PROBE_WITHIN)
    if replica is None:
        host.counters["fast_answers_not_asked"] += 1
        return None
    message = Lookup(opening.request_id, opening.owner, question, is_probe=False)
    reply = await _ask(host, replica, message, host.settings.fast_answer_within)
    if reply is None:
        host.counters["fast_answers_not_in_time"] += 1
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
        _failed(host, breaker)
        return None
    if not _is_whole(reply, message.request_id):
        host.counters["bad_replies"] += 1
        _failed(host, breaker)
        return None
    breaker.succeeded()
    return reply


def _failed(host: Host, breaker: Breaker) -> None:
    before = breaker.opened
    breaker.failed(trio.current_time())
    host.counters["fast_answer_breakers_opened"] += breaker.opened - before


def _is_whole(reply: object, request_id: str) -> TypeGuard[Hit | Declined]:
    if not isinstance(reply, Hit | Declined) or reply.request_id != request_id:
        return False
    try:
        return not isinstance(reply, Hit) or reply.answer != ""
    except DamagedAnswer:
        return False
