"""`GET /v1/chat/completions/{id}`: finished turns that were to be stored, their owner's, and no others."""

import pytest

from actors.protocol import ErrorBody, TurnFailed
from tests.actors.edge.harness import GOLDEN, Script, chat, door, reply_events, trio_test

PATH = "/v1/chat/completions"
NOBODYS = "chatcmpl-01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.mark.parametrize("stream", [True, False])
@trio_test
async def test_a_stored_completion_is_shown_as_it_was_with_its_metadata(tmp_path, stream):
    script = Script(events=reply_events([GOLDEN, "Paris."], "length"))
    async with door(tmp_path, script) as d:
        reply = await d.post(chat(n=2, store=True, metadata={"a": "b"}, stream=stream))
        name = f"chatcmpl-{reply.headers['x-request-id']}"
        shown = (await d.get(f"{PATH}/{name}")).json()
        assert (shown["id"], shown["object"], shown["model"]) == (name, "chat.completion", "small")
        assert [c["message"]["content"] for c in shown["choices"]] == [GOLDEN, "Paris."]
        assert [c["finish_reason"] for c in shown["choices"]] == ["length", "length"]
        assert (shown["metadata"], shown["usage"]["total_tokens"]) == ({"a": "b"}, 19)
        if not stream:
            whole = reply.json()
            assert {key: shown[key] for key in whole} == whole


@trio_test
async def test_what_is_not_there_not_stored_or_another_owners_is_the_same_404(tmp_path):
    async with door(tmp_path) as d:
        _, secret = d.accounts.create_key("other", "theirs")
        theirs = {"authorization": f"Bearer {secret}"}
        stored = (await d.post(chat(store=True))).json()["id"]
        unstored = [(await d.post(chat(**fields))).json()["id"] for fields in ({}, {"store": False})]
        asked = [(name, {}) for name in (*unstored, NOBODYS, "chatcmpl-x", f"resp_{stored}")]
        texts = set()
        for name, headers in (*asked, (stored, theirs)):
            answer = await d.get(f"{PATH}/{name}", headers=headers)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
            texts.add(answer.json()["error"]["message"].replace(name, "ID"))
        assert texts == {"Chat completion with id 'ID' not found."}
        assert (await d.get(f"{PATH}/{stored}")).status_code == 200


@trio_test
async def test_a_turn_that_failed_or_goes_on_is_no_completion(tmp_path):
    failed = [*reply_events([GOLDEN])[:2], TurnFailed(3, ErrorBody(500, "server_error", "it broke"))]
    async with door(tmp_path, Script(events=failed)) as d:
        reply = await d.post(chat(store=True, stream=True))
        assert (await d.get(f"{PATH}/chatcmpl-{reply.headers['x-request-id']}")).status_code == 404
    async with door(tmp_path, Script(hold_after=2)) as d, d.http() as client:
        body = chat(store=True, stream=True)
        async with client.stream("POST", PATH, json=body) as reply:
            name = f"{PATH}/chatcmpl-{reply.headers['x-request-id']}"
            assert (await client.get(name)).status_code == 404
            await d.session.release()
            assert "[DONE]" in "".join([text async for text in reply.aiter_text()])
        assert (await client.get(name)).status_code == 200


@trio_test
async def test_a_query_is_refused_by_name(tmp_path):
    async with door(tmp_path) as d:
        name = (await d.post(chat(store=True))).json()["id"]
        answer = await d.get(f"{PATH}/{name}", params={"include": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


@pytest.mark.parametrize(("tier", "shown"), [("auto", "default"), ("default", "default"), (None, None)])
@trio_test
async def test_the_tier_that_served_is_said_where_one_was_asked_for(tmp_path, tier, shown):
    async with door(tmp_path) as d:
        assert (await d.post(chat(service_tier=tier))).json().get("service_tier") == shown
