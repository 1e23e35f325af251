"""Where turns go: to the least loaded live batcher, or the one that has their beginning, and why."""

import json
import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.protocol import Load, Route, Routed, Unroutable
from actors.router import Router, RouterSettings
from supervision.local import LocalTree
from supervision.log import JsonLines

SETTINGS = RouterSettings(
    ("smol", "big"), aliases={"default": "smol", "gpt": "big"}, batchers={"batcher.9": "big"}
)


def with_router(test):
    def run():
        async def body():
            async with LocalTree() as tree:
                await tree.start("router", Router(SETTINGS))
                await test(tree, tree.client("session.0"))

        trio.run(body, clock=MockClock())

    run.__name__ = test.__name__
    return run


async def route(client, model="default", **facts):
    return await client.ask("router", Route("r", "acme", model, 10, **facts), timeout=5)


def routed(batcher, reason):
    return Routed("r", batcher, "smol", reason, 1600)


async def loads(tree, **requests):
    """Bring up batchers that report so many running requests each; `b0=3` is batcher.0 with 3."""
    clients = {}
    for name, running in requests.items():
        client = clients[name] = tree.client(f"batcher.{name[1:]}")
        await client.tell("router", Load("smol", running, 0, 100, 100, 1600))
    await wait_all_tasks_blocked()
    return clients


@with_router
async def test_a_name_nobody_serves_is_404(tree, client):
    await loads(tree, b0=0)
    refused = await route(client, "gpt-7")
    assert isinstance(refused, Unroutable)
    error = refused.error
    assert (error.status, error.type, error.code, error.param) == (
        404,
        "invalid_request_error",
        "model_not_found",
        "model",
    )
    assert "gpt-7" in error.message


@with_router
async def test_no_live_batcher_is_503(tree, client):
    error = (await route(client)).error
    assert (error.status, error.type, error.code) == (
        503,
        "service_unavailable_error",
        "server_is_overloaded",
    )


@with_router
async def test_an_alias_and_the_name_itself_are_the_same_model(tree, client):
    await loads(tree, b0=0)
    assert await route(client, "default") == await route(client, "smol") == routed("batcher.0", "only")


@with_router
async def test_a_batcher_of_another_model_is_not_asked(tree, client):
    tree.client("batcher.9")
    assert isinstance(await route(client, "smol"), Unroutable)
    assert (await route(client, "gpt")).batcher == "batcher.9"


@with_router
async def test_the_least_loaded_is_chosen_and_a_burst_is_spread(tree, client):
    await loads(tree, b0=4, b1=1, b2=2)
    chosen = [(await route(client)).batcher for _ in range(4)]
    assert chosen == ["batcher.1", "batcher.1", "batcher.2", "batcher.1"]


@with_router
async def test_a_batcher_that_has_said_nothing_yet_is_taken_as_idle(tree, client):
    await loads(tree, b0=1)
    tree.client("batcher.1")
    assert (await route(client)).batcher == "batcher.1"


@with_router
async def test_a_prefix_stays_where_it_is_until_that_batcher_is_much_fuller(tree, client):
    clients = await loads(tree, b0=0, b1=0)
    assert (await route(client, prefix="p")).batcher == "batcher.0"
    await clients["b0"].tell("router", Load("smol", 4, 0, 100, 100, 1600))
    await wait_all_tasks_blocked()
    assert await route(client, prefix="p") == routed("batcher.0", "prefix")
    assert await route(client, prefix="p") == routed("batcher.1", "least loaded")


@with_router
async def test_each_conversation_stays_at_the_batcher_that_has_its_beginning(tree, client):
    clients = await loads(tree, b0=0, b1=0, b2=0, b3=0)
    first = {prefix: (await route(client, prefix=prefix)).batcher for prefix in "abcd"}
    assert sorted(first.values()) == ["batcher.0", "batcher.1", "batcher.2", "batcher.3"]
    for running in (0, 1, 2):
        for name, batcher in clients.items():
            await batcher.tell("router", Load("smol", running if name == "b2" else 0, 0, 100, 100, 1600))
        await wait_all_tasks_blocked()
        for prefix in "dbca":
            assert await route(client, prefix=prefix) == routed(first[prefix], "prefix")


@with_router
async def test_a_dead_batcher_s_conversations_go_elsewhere_and_the_others_stay(tree, client):
    await loads(tree, b0=0, b1=0, b2=0)
    first = {prefix: (await route(client, prefix=prefix)).batcher for prefix in "abc"}
    (lost,) = [prefix for prefix, batcher in first.items() if batcher == "batcher.1"]
    await tree.kill("batcher.1")
    await wait_all_tasks_blocked()
    moved = await route(client, prefix=lost)
    assert (moved.batcher != "batcher.1", moved.reason) == (True, "least loaded")
    for prefix in first.keys() - {lost}:
        assert await route(client, prefix=prefix) == routed(first[prefix], "prefix")
    await loads(tree, b1=0)  # it comes back empty: what was there once draws nobody to it
    assert await route(client, prefix=lost) == routed(moved.batcher, "prefix")


@with_router
async def test_batchers_to_avoid_are_avoided_even_when_they_have_the_prefix(tree, client):
    await loads(tree, b0=0, b1=9)
    await route(client, prefix="p")
    assert (await route(client, prefix="p", avoid=("batcher.0",))).batcher == "batcher.1"
    error = (await route(client, avoid=("batcher.0", "batcher.1"))).error
    assert error.status == 503


@with_router
async def test_a_dead_batcher_s_load_and_prefixes_are_forgotten(tree, client):
    await loads(tree, b0=0, b1=3)
    await route(client, prefix="p")
    await tree.kill("batcher.0")
    await wait_all_tasks_blocked()
    assert (await route(client, prefix="q")).batcher == "batcher.1"
    await loads(tree, b0=5)
    assert await route(client, prefix="p") == routed("batcher.1", "least loaded")


def test_every_decision_is_logged_with_its_reason(caplog):
    @with_router
    async def decide(tree, client):
        await loads(tree, b0=0)
        await route(client)
        await route(client, "nope")

    with caplog.at_level(logging.INFO, "actors.router"):
        decide()
    lines = [json.loads(JsonLines("router", 1).format(record)) for record in caplog.records]
    decisions = [line for line in lines if line["event"] == "route"]
    assert [(line["batcher"], line["reason"]) for line in decisions] == [
        ("batcher.0", "only"),
        ("", "unknown model"),
    ]
    assert [line["request_id"] for line in decisions] == ["r", "r"]


@with_router
async def test_a_batcher_that_has_not_reported_has_an_unknown_context(tree, client):
    tree.client("batcher.0")
    assert await route(client) == Routed("r", "batcher.0", "smol", "only", 0)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [({"models": ()}, "at least one"), ({"models": ("a",), "aliases": {"x": "b"}}, "'b' is not among")],
)
def test_settings_that_cannot_be_served_say_so(facts, complaint):
    with pytest.raises(ValueError, match=complaint):
        RouterSettings(**facts)
