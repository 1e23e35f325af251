"""The websocket at `/v1/responses`."""

import json

import pytest
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, open_websocket_url

from actors.edge.connection import GuardedH11
from actors.edge.server import ServerLimits
from actors.protocol import ErrorBody
from tests.actors.edge.harness import GOLDEN, MESSAGES, Script, chat, door, trio_test, until


def connect(d, secret=None):
    headers = [("Authorization", f"Bearer {secret or d.secret}")]
    return open_websocket_url(f"ws://127.0.0.1:{d.port}/v1/responses", extra_headers=headers)


def create(**fields) -> str:
    return json.dumps({"type": "response.create", "model": "default", "input": "hello", **fields})


async def events_of(socket) -> list[dict]:
    made = []
    while not made or made[-1]["type"] not in {
        "response.completed",
        "response.failed",
        "response.incomplete",
        "error",
    }:
        made.append(json.loads(await socket.get_message()))
    return made


def text_of(events: list[dict]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@trio_test
async def test_a_frame_is_answered_with_the_events_of_a_response(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        for frame in (
            create(),
            json.dumps({"type": "response.create", "response": {"model": "default", "input": "hello"}}),
        ):
            await socket.send_message(frame)
            events = await events_of(socket)
            assert text_of(events) == GOLDEN
            assert events[-1]["type"] == "response.completed"
        assert len(d.script.openings) == 2


@trio_test
async def test_frames_sent_ahead_are_answered_one_after_another(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        for _ in range(3):
            await socket.send_message(create())
        ids = set()
        for _ in range(3):
            events = await events_of(socket)
            assert text_of(events) == GOLDEN
            ids.add(events[0]["response"]["id"])
        assert len(ids) == 3


BAD = {
    "not json": "hello",
    "not an object": "[]",
    "no type": json.dumps({"model": "default", "input": "x"}),
    "another type": json.dumps({"type": "response.cancel"}),
    "no input": json.dumps({"type": "response.create", "model": "default"}),
    "stream": create(stream=True),
    "background": create(background=True),
    "temperature": create(temperature=9),
    "messages": create(messages=MESSAGES),
    "surrogate": '{"type": "response.create", "model": "default", "input": "\\ud800"}',
    "unknown model": create(model="nothing"),
}


@pytest.mark.parametrize("name", BAD)
@trio_test
async def test_a_bad_frame_gets_an_error_and_the_connection_goes_on(tmp_path, name):
    async with door(tmp_path) as d, connect(d) as socket:
        await socket.send_message(BAD[name])
        error = (await events_of(socket))[-1]
        assert error["type"] == "error"
        assert error["status"] in {400, 404}
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert error["headers"]["x-request-id"]
        await socket.send_message(create().encode())
        assert text_of(await events_of(socket)) == GOLDEN


@trio_test
async def test_limits_are_checked_for_each_frame(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        d.script.refuse = ErrorBody(
            429, "requests", "too many", "", "rate_limit_exceeded", (("retry-after", "1"),)
        )
        await socket.send_message(create())
        error = (await events_of(socket))[-1]
        assert (error["status"], error["code"], error["headers"]["retry-after"]) == (
            429,
            "rate_limit_exceeded",
            "1",
        )
        assert error["headers"]["x-request-id"] == d.script.openings[0].request_id
        d.script.refuse = None
        await socket.send_message(create())
        assert text_of(await events_of(socket)) == GOLDEN


@trio_test
async def test_a_key_that_is_revoked_is_refused_from_the_next_frame_on(tmp_path):
    async with door(tmp_path) as d:
        key_id, secret = d.accounts.create_key("acme", "second")
        async with connect(d, secret) as socket:
            await socket.send_message(create())
            await events_of(socket)
            d.accounts.revoke(key_id)
            await socket.send_message(create())
            assert (await events_of(socket))[-1]["status"] == 401


@trio_test
async def test_no_upgrade_without_a_good_key(tmp_path):
    async with door(tmp_path) as d:
        with pytest.raises((ConnectionRejected, BaseExceptionGroup)) as caught:
            async with connect(d, "wrong"):
                raise AssertionError
        rejected = (
            caught.value if isinstance(caught.value, ConnectionRejected) else caught.value.exceptions[0]
        )
        assert rejected.status_code == 401
        assert json.loads(rejected.body)["error"]["code"] == "invalid_api_key"
        assert [v for n, v in rejected.headers if n.lower() == b"x-request-id"]
        await d.golden()


@trio_test
async def test_a_socket_that_closes_leaves_its_turn(tmp_path):
    async with door(tmp_path, Script(hold_after=1)) as d:
        async with connect(d) as socket:
            await socket.send_message(create())
            await socket.get_message()
        await until(lambda: len(d.script.left) == 1)
        await until(lambda: d.edge._server.connections == 0)


@trio_test
async def test_a_frame_that_is_too_large_closes_the_socket(tmp_path):
    async with door(tmp_path, limits=ServerLimits(frame_bytes=10_000)) as d:
        async with connect(d) as socket:
            await socket.send_message(create(input="x" * 20_000))
            with pytest.raises(ConnectionClosed) as caught:
                await socket.get_message()
            assert caught.value.reason.code == 1009
        assert (await d.post(chat())).status_code == 200


@trio_test
async def test_a_silent_socket_is_pinged_and_kept_while_it_answers(tmp_path, monkeypatch):
    pings = []
    ping = GuardedH11.ping

    async def counted(protocol):
        pings.append(protocol)
        await ping(protocol)

    monkeypatch.setattr(GuardedH11, "ping", counted)
    async with door(tmp_path, limits=ServerLimits(ping=0.2)) as d, connect(d) as socket:
        await until(lambda: len(pings) == 3)
        await socket.send_message(create())
        assert text_of(await events_of(socket)) == GOLDEN


@trio_test
async def test_a_socket_that_answers_no_ping_is_gone(tmp_path):
    async with door(tmp_path, limits=ServerLimits(ping=0.05)) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        async with stream:
            await stream.send_all(
                b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer "
                + d.secret.encode()
                + b"\r\n\r\n"
            )
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 101")
            await until(lambda: d.edge._server.connections == 0)


@trio_test
async def test_the_upgrade_and_each_refused_frame_have_request_ids_of_their_own(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        ids = {value for name, value in socket.handshake_headers if name.lower() == b"x-request-id"}
        assert len(ids) == 1
        for _ in range(2):
            await socket.send_message("hello")
            ids.add((await events_of(socket))[-1]["headers"]["x-request-id"].encode())
        assert len(ids) == 3
        assert all(len(i) == 36 for i in ids)


@trio_test
async def test_compression_is_not_offered(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        assert "sec-websocket-extensions" not in {name.lower() for name, _ in socket.handshake_headers}


@trio_test
async def test_an_idle_socket_is_closed_when_the_edge_stops(tmp_path):
    async with door(tmp_path) as d, connect(d) as socket:
        await socket.send_message(create())
        await events_of(socket)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.tree.stop, "edge.0")
            with pytest.raises(ConnectionClosed) as caught:
                await socket.get_message()
        assert caught.value.reason.code == 1001
