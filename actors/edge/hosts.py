"""Which session host a turn lives on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from actors.edge import request_ids
from supervision.tree import Tree

KIND = "session"


def members(tree: Tree) -> list[str]:
    """Every session host of the tree, up or not, sorted."""
    return sorted(n for n in tree.members if n == KIND or n.rpartition(".")[0] == KIND)


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """Return the names in the order in which `key` prefers them (highest random weight first).

    A name that joins or leaves moves only the keys that prefer it.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{name}\0{key}".encode()).digest(), reverse=True)


def key_of(*, conversation: str, idempotency_key: str, owner: str, digest: str) -> str:
    """Return what decides a new turn's host.

    A retry must land where the first try did, so it is the conversation, else the idempotency key, else the
    body itself, always with the owner. The host is chosen among all members, not only those that are up:
    one that is restarting holds the journal of the first try, and is back in a moment.
    """
    if conversation:
        return f"conversation\0{owner}\0{conversation}"
    if idempotency_key:
        return f"idempotency\0{owner}\0{idempotency_key}"
    return f"body\0{owner}\0{digest}"


def for_request(tree: Tree, request_id: str) -> list[str]:
    """Return the hosts that may know a turn, the one its id hints at first."""
    number = request_ids.hint(request_id)
    return sorted(members(tree), key=lambda name: (request_ids.host_number(name) != number, name))
