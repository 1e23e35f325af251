"""Streams that survive: a host that dies, events that are lost or doubled, an edge that stops."""

import json

import pytest
import trio

from actors.edge import server
from actors.edge.turns import Patience
from actors.protocol import ErrorBody, TextDelta, TurnFailed
from actors.turn_errors import overloaded
from tests.actors.edge.harness import (
    GOLDEN,
    Script,
    ScriptedSession,
    chat,
    door,
    read_all,
    reply_events,
    sse_events,
    trio_test,
    until,
)


def text_of(body: str, choice: int = 0) -> str:
    chunks = [json.loads(e) for e in sse_events(body) if e != "[DONE]"]
    parts = [c for chunk in chunks for c in chunk.get("choices", []) if c["index"] == choice]
    return "".join(p["delta"].get("content", "") for p in parts)


@pytest.mark.parametrize("after", range(8))
@trio_test
async def test_a_stream_outlives_its_session_host_without_a_word_lost_or_doubled(tmp_path, after):
    async with door(tmp_path, Script(hold_after=after)) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            parts = reply.aiter_text()
            got = await anext(parts)
            await until(
                lambda: all(s == after for t in d.script.turns.values() for _, s in t.readers.values())
            )
            await d.tree.kill("session.0")
            d.session = ScriptedSession(d.script)
            await d.tree.start("session.0", d.session)
            d.script.hold_after = None
            async for part in parts:
                got += part
        assert text_of(got) == GOLDEN
        assert sse_events(got)[-1] == "[DONE]"
        assert len(d.script.openings) == 1
        assert d.script.attaches[0].after <= after
        assert d.edge._turns.reattached == 1


@trio_test
async def test_a_whole_reply_outlives_its_session_host(tmp_path):
    async with door(tmp_path, Script(hold_after=3)) as d, trio.open_nursery() as nursery:
        nursery.start_soon(d.golden)
        await until(lambda: bool(d.script.turns))
        await d.restart_session()
        await d.session.release()


@trio_test
async def test_a_request_waits_for_a_host_that_is_restarting_before_it_accepts(tmp_path):
    async with door(tmp_path) as d, trio.open_nursery() as nursery:
        await d.tree.kill("session.0")
        nursery.start_soon(d.golden)
        await trio.sleep(0.05)
        await d.tree.start("session.0", ScriptedSession(d.script))


@trio_test
async def test_a_host_that_stays_down_is_a_503_that_may_be_retried(tmp_path):
    async with door(tmp_path, patience=Patience(host=0.05)) as d:
        await d.tree.kill("session.0")
        answer = await d.post(chat())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_is_overloaded"
        assert int(answer.headers["retry-after"]) >= 1


@trio_test
async def test_a_stream_whose_host_stays_down_ends_with_one_error_and_no_done(tmp_path):
    async with (
        door(tmp_path, Script(hold_after=2), patience=Patience(reattach=0.05)) as d,
        d.http() as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            parts = reply.aiter_text()
            got = await anext(parts)
            await d.tree.kill("session.0")
            async for part in parts:
                got += part
        events = [json.loads(e) for e in sse_events(got)]
        assert set(events[-1]) == {"error"}
        assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])
        assert GOLDEN.startswith(text_of("".join(f"data: {json.dumps(e)}\n\n" for e in events[:-1])))


@trio_test
async def test_a_turn_that_its_host_does_not_know_any_more_ends_with_an_error(tmp_path):
    async with door(tmp_path, Script(hold_after=2)) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            parts = reply.aiter_text()
            got = await anext(parts)
            d.script.turns.clear()
            await d.restart_session()
            async for part in parts:
                got += part
        assert "error" in json.loads(sse_events(got)[-1])


@trio_test
async def test_events_that_come_twice_are_passed_on_once(tmp_path):
    async with door(tmp_path, Script(twice=True, hold_after=3)) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            reader = next(iter(d.edge._turns.readers()))
            await until(lambda: reader.duplicates == 3)
            await d.session.release()
            body = "".join([part async for part in reply.aiter_text()])
        assert text_of(body) == GOLDEN


@pytest.mark.parametrize("lost", range(1, 9))
@trio_test
async def test_an_event_that_is_lost_is_fetched_again(tmp_path, lost):
    async with door(tmp_path, Script(skip=lost), keepalive=0.05) as d:
        body = (await d.post(chat(stream=True))).text
        assert text_of(body) == GOLDEN
        assert sse_events(body)[-1] == "[DONE]"
        assert d.script.attaches[0].after == lost - 1


@trio_test
async def test_keepalives_come_before_the_first_token_and_between_them(tmp_path):
    async with door(tmp_path, Script(hold_after=0), keepalive=0.03) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            got = ""
            async for part in reply.aiter_text():
                got += part
                if got.count(": keepalive\n\n") == 2 and d.script.hold_after == 0:
                    await d.session.release(2)
                if got.count(": keepalive\n\n") == 4 and d.script.hold_after == 2:
                    await d.session.release()
        assert text_of(got) == GOLDEN


@trio_test
async def test_a_turn_that_fails_ends_with_its_error(tmp_path):
    events = [*reply_events([GOLDEN])[:2], TurnFailed(3, ErrorBody(500, "server_error", "it broke"))]
    async with door(tmp_path, Script(events=events)) as d:
        streamed = sse_events((await d.post(chat(stream=True))).text)
        assert json.loads(streamed[-1])["error"]["message"] == "it broke"
        assert "[DONE]" not in streamed
        whole = await d.post(chat())
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it broke")


@trio_test
async def test_a_turn_that_is_shed_is_a_503_that_says_when_to_ask_again(tmp_path):
    events = [*reply_events([GOLDEN])[:2], TurnFailed(3, overloaded("no room"))]
    async with door(tmp_path, Script(events=events)) as d:
        whole = await d.post(chat())
        assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
        streamed = json.loads(sse_events((await d.post(chat(stream=True))).text)[-1])
        for error in (whole.json()["error"], streamed["error"]):
            assert (error["type"], error["code"]) == ("service_unavailable_error", "server_is_overloaded")


@trio_test
async def test_choices_are_told_apart(tmp_path):
    async with door(tmp_path, Script(events=reply_events(["one two three", "four five", "six"]))) as d:
        body = (await d.post(chat(stream=True, n=3))).text
        assert [text_of(body, c) for c in range(3)] == ["one two three", "four five", "six"]
        whole = (await d.post(chat(n=3))).json()["choices"]
        assert [(c["index"], c["message"]["content"]) for c in whole] == [
            (0, "one two three"),
            (1, "four five"),
            (2, "six"),
        ]


@pytest.mark.parametrize(
    ("options", "asked"), [({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)]
)
@trio_test
async def test_usage_has_its_own_chunk_when_asked_and_only_then(tmp_path, options, asked):
    async with door(tmp_path) as d:
        chunks = [
            json.loads(e)
            for e in sse_events((await d.post(chat(stream=True, stream_options=options))).text)[:-1]
        ]
        assert [bool(c["choices"]) for c in chunks if c.get("usage")] == ([False] if asked else [])
        assert all(("usage" in c) == asked for c in chunks)


@trio_test
async def test_logprobs_go_with_their_text_even_when_it_was_held_back(tmp_path):
    events = reply_events(["a b"], logprobs=True)
    first, second = events[0], events[1]
    events[0] = TextDelta(1, 0, 0, "", first.logprobs)
    events[1] = TextDelta(2, 0, 0, "a b", second.logprobs)
    async with door(tmp_path, Script(events=events)) as d:
        body = (await d.post(chat(stream=True, logprobs=True, top_logprobs=1))).text
        chunks = [json.loads(e)["choices"][0] for e in sse_events(body)[:-1]]
        shown = [t["token"] for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]]
        assert shown == ["a", " b"]
        assert all(c["delta"].get("content") != "" for c in chunks[1:])
        whole = (await d.post(chat(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
        assert [t["token"] for t in whole] == ["a", " b"]
        assert whole[0] == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
        }


ODD = "a\u2028b\u2029c\u0085d\r\ne\n\nf: g data: h 🎉👩‍👩‍👧 мир \x1c \ufeff"


@trio_test
async def test_line_ends_of_all_kinds_stay_inside_their_event(tmp_path):
    async with door(tmp_path, Script(text=ODD)) as d:
        body = (await d.post(chat(stream=True))).text
        assert text_of(body) == ODD
        assert not {"\u2028", "\u2029", "\u0085"} & set(body)
        assert len(body.splitlines()) == body.count("\n")
        assert (await d.post(chat())).json()["choices"][0]["message"]["content"] == ODD


@trio_test
async def test_a_request_with_an_idempotency_key_comes_back_to_its_turn(tmp_path):
    async with door(tmp_path) as d:
        headers = {"idempotency-key": "once"}
        first = await d.post(chat(), headers=headers)
        again = await d.post(chat(stream=True), headers=headers)
        assert len(d.script.turns) == 1
        assert text_of(again.text) == GOLDEN
        assert json.loads(sse_events(again.text)[0])["id"] == first.json()["id"]
        assert first.headers["x-request-id"] == again.headers["x-request-id"], (
            "the turn's own: it can be rated by it"
        )


@trio_test
async def test_what_makes_a_retry_one_reaches_the_session(tmp_path):
    async with door(tmp_path) as d:
        await d.post(chat(), headers={"x-stainless-retry-count": "0"})
        await d.post(chat(), headers={"x-stainless-retry-count": "1", "idempotency-key": "k"})
        await d.post(chat(user="x"))
        first, second, third = d.script.openings
        assert (first.is_retry, second.is_retry) == (False, True)
        assert second.idempotency_key == "k"
        assert first.body_digest == second.body_digest != third.body_digest


@pytest.mark.parametrize(
    "headers",
    [
        {"idempotency-key": "x" * 256},
        {"idempotency-key": "é".encode("latin-1")},
        {"x-stainless-retry-count": "x"},
        {"x-client-request-id": "x" * 513},
    ],
)
@trio_test
async def test_malformed_headers_are_refused(tmp_path, headers):
    async with door(tmp_path) as d:
        assert (await d.post(chat(), headers=headers)).status_code == 400


@trio_test
async def test_stopping_lets_a_stream_end_and_takes_no_new_connection(tmp_path):
    async with door(tmp_path, Script(hold_after=2)) as d, d.http() as client, trio.open_nursery() as nursery:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            parts = reply.aiter_text()
            got = await anext(parts)
            nursery.start_soon(d.tree.stop, "edge.0")
            await until(d.edge._services.draining.is_set)
            await d.session.release()
            async for part in parts:
                got += part
        assert sse_events(got)[-1] == "[DONE]"
        assert text_of(got) == GOLDEN


@trio_test
async def test_stopping_answers_who_was_accepted_before_it_and_asks_after(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "FIRST_WORDS", 30.0)
        async with door(tmp_path) as d, trio.open_nursery() as nursery:
            stream = await trio.open_tcp_stream("127.0.0.1", d.port)
            await until(lambda: d.edge._server.connections == 1)
            nursery.start_soon(d.tree.stop, "edge.0")
            await until(d.edge._services.draining.is_set)
            await stream.send_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await read_all(stream)).startswith(b"HTTP/1.1 200")


@trio_test
async def test_stopping_closes_who_was_accepted_and_says_nothing(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "FIRST_WORDS", 0.01)
        async with door(tmp_path, drain_seconds=30.0) as d:
            stream = await trio.open_tcp_stream("127.0.0.1", d.port)
            await until(lambda: d.edge._server.connections == 1)
            await d.tree.stop("edge.0")
            assert await read_all(stream) == b""


@trio_test
async def test_stopping_ends_a_stream_that_outlasts_the_drain_with_an_error(tmp_path):
    async with door(tmp_path, Script(hold_after=2), drain_seconds=0.05) as d, d.http() as client:
        async with (
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply,
            trio.open_nursery() as nursery,
        ):
            parts = reply.aiter_text()
            got = await anext(parts)
            nursery.start_soon(d.tree.stop, "edge.0")
            async for part in parts:
                got += part
        last = json.loads(sse_events(got)[-1])
        assert last["error"]["type"] == "service_unavailable_error"
        assert "[DONE]" not in got


@trio_test
async def test_stopping_answers_a_whole_reply_that_outlasts_the_drain(tmp_path):
    async with door(tmp_path, Script(hold_after=2), drain_seconds=0.05) as d, trio.open_nursery() as nursery:
        answers = []

        async def ask() -> None:
            answers.append(await d.post(chat()))

        nursery.start_soon(ask)
        await until(lambda: bool(d.script.turns))
        await d.tree.stop("edge.0")
        await until(lambda: bool(answers))
        assert answers[0].status_code == 503
