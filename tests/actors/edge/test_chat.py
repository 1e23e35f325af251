"""Chat completions over the real server."""

import json

from tests.actors.edge.harness import GOLDEN, Script, chat, door, sse_events, trio_test


@trio_test
async def test_a_whole_reply(tmp_path):
    async with door(tmp_path) as d:
        answer = await d.post(chat())
        body = answer.json()
        assert answer.status_code == 200
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": GOLDEN, "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"]["total_tokens"] == 18
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert body["id"] == f"chatcmpl-{d.script.openings[0].request_id}"
        assert answer.headers["x-request-id"] == d.script.openings[0].request_id
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        assert "server" not in answer.headers


@trio_test
async def test_a_streamed_reply(tmp_path):
    async with door(tmp_path) as d:
        answer = await d.post(chat(stream=True))
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        events = sse_events(answer.text)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == GOLDEN
        assert all(c["choices"][0]["delta"].get("content") for c in chunks[1:-1])
        assert chunks[-1]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert all("usage" not in c for c in chunks)
        assert d.script.left == []
        assert d.script.consumed[-1].through == len(next(iter(d.script.turns.values())).events)


@trio_test
async def test_the_script_host(tmp_path):
    async with door(tmp_path, Script(hold_after=2)) as d:
        async with (
            d.http() as client,
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply,
        ):
            got = ""
            async for text in reply.aiter_text():
                got += text
                if " capital" in got and d.script.hold_after is not None:
                    await d.restart_session()
                    await d.session.release()
        assert sse_events(got)[-1] == "[DONE]"
