"""Clients that break servers. After each, a good request gives the golden text, and no connection is left."""

import json
import re
import socket
import struct

import pytest
import trio

from actors.edge.server import ServerLimits, descriptors
from tests.actors.edge.harness import GOLDEN, Script, chat, door, read_all, trio_test, until

UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"


def h2_headers(block: bytes) -> bytes:
    return PREFACE + SETTINGS + struct.pack(">I", len(block))[1:] + b"\x01\x05" + struct.pack(">I", 1) + block


RAW = {
    "websocket upgrade with trailing bytes": UPGRADE + b"\r\n\x81\x05hello",
    "websocket upgrade with a body": UPGRADE + b"Content-Length: 5\r\n\r\nhello",
    "websocket upgrade without a key": UPGRADE.replace(
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""
    )
    + b"\r\n",
    "websocket upgrade of another version": UPGRADE.replace(b"13", b"8") + b"\r\n",
    "websocket upgrade over http/1.0": UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n",
    "websocket upgrade of another path": UPGRADE.replace(b"/v1/responses", b"/nowhere") + b"\r\n",
    "http/2 preface": PREFACE + SETTINGS,
    "http/2 with a non-ascii path": h2_headers(b"\x82\x86\x04\x03/\xc3\xa9\x41\x01x"),
    "http/2 with a non-ascii method": h2_headers(b"\x02\x03G\xc3\x89\x86\x84\x41\x01x"),
    "http/2 connect without a path": h2_headers(b"\x02\x07CONNECT\x41\x01x"),
    "upgrade to h2c": GET
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -4\r\n\r\nabcd",
    "bad chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "space in a header's name": b"GET / HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
    "nul in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "non-ascii path": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "non-ascii method": b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n",
    "escaped bytes in the path": b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "absolute target": b"GET http://x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "connect": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "trace": b"TRACE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "another version": b"GET / HTTP/3.0\r\nHost: x\r\n\r\n",
    "version 0.9": b"GET /\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "noise": bytes(range(256)) * 20,
    "newlines": b"\r\n" * 1000 + b"x",
    "a large head": GET + b"A: " + b"x" * 40_000 + b"\r\n\r\n",
    "an endless head": GET + b"A: " + b"x" * 200_000,
    "many headers": GET + b"".join(b"A%d: x\r\n" % i for i in range(200)) + b"\r\n",
    "a bad query": b"GET /v1/responses/resp_x?%ff=%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "expect": b"GET / HTTP/1.1\r\nHost: x\r\nExpect: teapot\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
@trio_test
async def test_hostile_bytes_end_their_own_connection(tmp_path, name):
    async with door(tmp_path) as d:
        answer = await d.raw(RAW[name], close_write=True)
        if answer:
            status = int(answer.split(b" ")[1])
            assert 200 <= status < 600
            assert b"server:" not in answer.lower()
            assert b"Traceback" not in answer
            assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
        await d.golden()
        await until(lambda: d.edge._server.connections == 0)
        assert d.script.openings[0].owner == "acme"
        assert len(d.script.openings) == 1


REFUSED = {
    "length and chunks": 400,
    "two lengths": 400,
    "no host": 400,
    "websocket upgrade with trailing bytes": 400,
    "http/2 preface": 505,
    "many headers": 431,
    "a large head": 431,
    "another version": 505,
    "non-ascii path": 400,
    "noise": 400,
    "two hosts": 400,
    "websocket upgrade without a key": 400,
    "websocket upgrade of another version": 400,
    "websocket upgrade over http/1.0": 400,
    "an endless head": 431,
}


@pytest.mark.parametrize("name", REFUSED)
@trio_test
async def test_what_is_not_http_is_refused_with_a_body_and_closed(tmp_path, name):
    async with door(tmp_path) as d:
        head, _, body = (await d.raw(RAW[name])).partition(b"\r\n\r\n")
        assert int(head.split(b" ")[1]) == REFUSED[name]
        assert b"connection: close" in head.lower()
        assert re.search(rb"\r\nx-request-id: [0-9a-f-]{36}(\r|$)", head.lower())
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


TOO_LONG = {
    "many headers": "The request has 201 headers; at most 100 are read.",
    "a large head": "its first line and headers) must have at most 32768 bytes. It has 40",
    "an endless head": "its first line and headers) must have at most 32768 bytes.",
    "an endless chunk head": "The head of a chunk, or the trailers, must have at most 32768 bytes.",
}
ENDLESS_CHUNK = {
    "an endless chunk head": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;"
    + b"x" * 40_000
}


@pytest.mark.parametrize("name", TOO_LONG)
@trio_test
async def test_what_is_too_long_is_named_with_its_limit(tmp_path, name):
    async with door(tmp_path) as d:
        answer = await d.raw((RAW | ENDLESS_CHUNK)[name])
        _, _, body = answer.partition(b"\r\n\r\n")
        assert TOO_LONG[name] in json.loads(body)["error"]["message"]


@trio_test
async def test_a_head_that_is_refused_gets_an_answer_without_content(tmp_path):
    async with door(tmp_path) as d:
        head, _, body = (await d.raw(b"HEAD" + RAW["many headers"][3:])).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431")
        assert b"x-request-id: " in head
        assert body == b""
        assert d.edge._server.contained == 0


@trio_test
async def test_a_refusal_is_whole_while_the_requests_own_task_answers_too(tmp_path):
    request = ENDLESS_CHUNK["an endless chunk head"]
    async with door(tmp_path) as d:
        for _ in range(20):
            _, _, body = (await d.raw(request)).partition(b"\r\n\r\n")
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert d.edge._server.contained == 0


@trio_test
async def test_bytes_sent_before_the_upgrades_answer_get_an_answer_with_an_id(tmp_path, monkeypatch):
    async def wait_for_ever(_):
        await trio.sleep_forever()

    monkeypatch.setattr("actors.edge.app.converse", wait_for_ever)
    async with door(tmp_path) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        async with stream:
            await stream.send_all(UPGRADE + b"\r\n")
            await until(lambda: any(c.protocol.stream for c in d.edge._server._open if not c.is_fresh))
            await stream.send_all(b"\x81\x05hello")
            head = (await stream.receive_some(1000)).lower()
        assert head.startswith(b"http/1.1 400")
        assert b"x-request-id: " in head


@trio_test
async def test_an_offer_of_http2_is_passed_over(tmp_path):
    async with door(tmp_path) as d:
        request = RAW["upgrade to h2c"].replace(b"Upgrade, HTTP2-Settings", b"close")
        assert (await d.raw(request)).startswith(b"HTTP/1.1 200")


@trio_test
async def test_a_body_with_two_framings_is_one_refusal_and_nothing_after_it(tmp_path):
    async with door(tmp_path) as d:
        answer = await d.raw(RAW["length and chunks"])
        assert answer.count(b"HTTP/1.1") == 1


@trio_test
async def test_a_bug_in_one_connection_resets_that_socket_only(tmp_path, monkeypatch):
    from actors.edge.connection import GuardedH11

    async with door(tmp_path, Script(hold_after=2)) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            with monkeypatch.context() as patch:

                def fail(*_):
                    raise RuntimeError("bug")

                patch.setattr(GuardedH11, "_check", fail)
                assert await d.raw(GET + b"\r\n") == b""
            await d.session.release()
            rest = "\n".join([line async for line in lines])
        assert "[DONE]" in rest
        assert d.edge._server.contained == 1
        await d.golden()


def post(d, body: bytes, *headers: str) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {d.secret}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("chunked", [True, False])
@trio_test
async def test_a_body_that_is_too_large_is_refused_while_it_comes(tmp_path, chunked):
    async with door(tmp_path, body_bytes=100_000) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        async with stream, trio.open_nursery() as nursery:
            framing = "Transfer-Encoding: chunked" if chunked else "Content-Length: 8388608"
            await stream.send_all(post(d, b"", framing))

            async def send() -> None:
                block = b"10000\r\n" + bytes(65536) + b"\r\n" if chunked else bytes(65536)
                for _ in range(128):
                    await stream.send_all(block)

            nursery.start_soon(send)
            answer = await read_all(stream)
            nursery.cancel_scope.cancel()
        assert answer.startswith(b"HTTP/1.1 413")
        assert d.script.openings == []
        await d.golden()


@trio_test
async def test_a_body_that_never_comes_is_a_408(tmp_path):
    async with door(tmp_path, body_seconds=0.05) as d:
        assert (await d.raw(post(d, b"{", "Content-Length: 100"))).startswith(b"HTTP/1.1 408")
        await d.golden()


@trio_test
async def test_a_head_that_trickles_is_cut_off(tmp_path):
    async with door(tmp_path, limits=ServerLimits(idle=0.1)) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        async with stream, trio.open_nursery() as nursery:

            async def trickle() -> None:
                for byte in GET * 100:
                    try:
                        await stream.send_all(bytes([byte]))
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        return
                    await trio.sleep(0.01)

            nursery.start_soon(trickle)
            assert await read_all(stream) == b""
            nursery.cancel_scope.cancel()
        await d.golden()


@trio_test
async def test_two_requests_in_one_write_are_answered_in_order(tmp_path):
    async with door(tmp_path) as d:
        body = json.dumps(chat()).encode()
        first = post(d, body, f"Content-Length: {len(body)}")
        answer = await d.raw(first + GET + b"Connection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.index(GOLDEN.encode()) < answer.index(b'"live"')


def reset(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
@pytest.mark.parametrize("streamed", [True, False])
@trio_test
async def test_a_client_that_is_gone_leaves_its_turn(tmp_path, how, streamed):
    async with door(tmp_path, Script(hold_after=1)) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        body = json.dumps(chat(stream=streamed)).encode()
        await stream.send_all(post(d, body, f"Content-Length: {len(body)}"))
        await until(lambda: bool(d.script.turns))
        if streamed:
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
        if how == "reset":
            reset(stream)
        elif how == "close":
            await stream.aclose()
        else:
            await stream.send_eof()
        await until(lambda: len(d.script.left) == 1)
        assert d.script.left[0].request_id == d.script.openings[0].request_id
        await until(lambda: d.edge._server.connections == 0 or how == "half close")
        await stream.aclose()
        d.script.hold_after = None
        await d.golden()


@trio_test
async def test_a_reader_that_stops_for_a_while_loses_nothing(tmp_path):
    text = " ".join(f"word{i}" + "x" * 2000 for i in range(2000))
    small = ServerLimits(unsent_bytes=16384)
    async with door(tmp_path, Script(text, hold_after=0), window=200, limits=small) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        body = json.dumps(chat(stream=True)).encode()
        await stream.send_all(post(d, body, f"Content-Length: {len(body)}", "Connection: close"))
        await until(lambda: bool(d.script.turns))
        for through in range(50, 2000, 50):
            await d.session.release(through)
            await trio.lowlevel.checkpoint()
        await d.session.release()
        reader = next(iter(d.edge._turns.readers()))
        assert len(reader._waiting) <= 200
        assert reader.missing
        async with stream:
            answer = await read_all(stream)
        events = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: {")]
        got = "".join(c["delta"].get("content", "") for e in events for c in json.loads(e)["choices"])
        assert got == text
        assert b"[DONE]" in answer


@trio_test
async def test_a_reader_that_never_reads_is_reset_at_the_deadline(tmp_path):
    text = " ".join(f"word{i}" + "x" * 500 for i in range(10_000))
    async with door(tmp_path, Script(text), limits=ServerLimits(send=0.2, unsent_bytes=16384)) as d:
        stream = await trio.open_tcp_stream("127.0.0.1", d.port)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(chat(stream=True)).encode()
        await stream.send_all(post(d, body, f"Content-Length: {len(body)}"))
        await until(lambda: len(d.script.left) == 1)
        await until(lambda: d.edge._server.connections == 0)
        await stream.aclose()
        d.script.text = GOLDEN
        await d.golden()


@trio_test
async def test_many_connections_at_once_are_served_and_none_is_left(tmp_path):
    async with door(tmp_path) as d:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(d.golden)
        await until(lambda: d.edge._server.connections == 0)
        assert list(d.edge._turns.readers()) == []


@trio_test
async def test_connections_over_the_limit_are_closed_and_the_rest_served(tmp_path):
    async with door(tmp_path, limits=ServerLimits(connections=2)) as d:
        kept = [await trio.open_tcp_stream("127.0.0.1", d.port) for _ in range(2)]
        await until(lambda: d.edge._server.connections == 2)
        assert await d.raw(GET + b"Connection: close\r\n\r\n") == b""
        for stream in kept:
            await stream.aclose()
        await until(lambda: d.edge._server.connections == 0)
        await d.golden()


@pytest.mark.slow
@trio_test
async def test_health_answers_while_1280_requests_are_open(tmp_path):
    async with door(tmp_path, Script(hold_after=1)) as d, trio.open_nursery() as nursery:
        answers = []

        async def one() -> None:
            body = json.dumps(chat(stream=True)).encode()
            answers.append(await d.raw(post(d, body, f"Content-Length: {len(body)}", "Connection: close")))

        for _ in range(1280):
            nursery.start_soon(one)
        await until(lambda: d.edge._server.connections >= 1280)
        assert (await d.get("/health/live")).status_code == 200
        await until(lambda: len(d.script.turns) == 1280)
        assert (await d.get("/health/live")).status_code == 200
        await d.session.release()
        await until(lambda: len(answers) == 1280)
        assert all(b"[DONE]" in a for a in answers)
    assert d.script.left == []


def test_a_full_edge_keeps_descriptors_for_the_tree():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        assert descriptors() > 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
