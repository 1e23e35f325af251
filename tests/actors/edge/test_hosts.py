"""Which session host a turn lives on, and how its id tells."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from actors.edge import hosts, request_ids
from supervision.tree import Member, Tree

NAMES = [f"session.{i}" for i in range(5)]


def tree(*up: str, down: tuple[str, ...] = ()) -> Tree:
    members = {n: Member(n, 1, "up") for n in up} | {n: Member(n, 1, "down") for n in down}
    return Tree(1, members)


@given(st.text(), st.integers(0, 4))
def test_losing_a_host_moves_only_its_own_keys(key, lost):
    first, *rest = hosts.rendezvous(key, NAMES)
    left = hosts.rendezvous(key, [n for n in NAMES if n != NAMES[lost]])
    assert left == [n for n in (first, *rest) if n != NAMES[lost]]


def test_keys_spread_over_hosts():
    chosen = [hosts.rendezvous(str(i), NAMES)[0] for i in range(1000)]
    assert all(150 < chosen.count(name) < 250 for name in NAMES)


def test_a_host_that_is_restarting_keeps_its_keys():
    assert hosts.members(tree("session.0", "limiter", down=("session.1",))) == ["session.0", "session.1"]


def test_owners_with_equal_bodies_or_keys_are_apart():
    same = {"conversation": "", "idempotency_key": "k", "digest": "d"}
    assert hosts.key_of(owner="a", **same) != hosts.key_of(owner="b", **same)
    retried = hosts.key_of(conversation="", idempotency_key="", owner="a", digest="d")
    assert retried == hosts.key_of(conversation="", idempotency_key="", owner="a", digest="d")


@given(st.integers(0, 4095), st.integers(0, 2**48 - 1))
def test_an_id_is_a_uuid7_that_names_its_host(number, now):
    made = request_ids.mint(f"session.{number}", now_ms=now)
    value = uuid.UUID(made)
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert value.int >> 80 == now
    assert request_ids.hint(made) == number
    assert request_ids.parse(f"resp_{made}", "resp_") == made


def test_the_host_of_an_id_is_asked_first():
    made = request_ids.mint("session.1")
    assert hosts.for_request(tree(*NAMES), made)[0] == "session.1"
    assert hosts.for_request(tree("session"), made) == ["session"]


@given(st.text(max_size=50))
def test_only_our_own_ids_are_ids(text):
    assert request_ids.parse(text, "resp_") is None
    assert request_ids.parse(f"resp_{text}", "resp_") is None


def test_an_id_in_another_spelling_is_none():
    made = request_ids.mint("session.0")
    for other in (
        made.upper().replace("7", "7"),
        made.replace("-", ""),
        "{" + made + "}",
        f"urn:uuid:{made}",
        str(uuid.uuid4()),
    ):
        assert request_ids.parse(f"resp_{other}", "resp_") in (None, made if other == made else None)
