"""`/v1/responses`: the second face of a turn, and coming back to it by its id."""

import json

import pytest
import trio

from actors.protocol import ChoiceDone, ErrorBody, TextDelta, TurnDone, TurnFailed, Usage
from tests.actors.edge.harness import (
    GOLDEN,
    Script,
    ScriptedSession,
    door,
    reply_events,
    sse_events,
    trio_test,
    until,
)

PATH = "/v1/responses"


def ask(**fields):
    return {"model": "default", "input": "What is the capital of France?", **fields}


async def streamed(d, **fields) -> list[dict]:
    return [json.loads(e) for e in sse_events((await d.post(ask(stream=True, **fields), PATH)).text)]


def deltas(events: list[dict]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@trio_test
async def test_a_whole_response(tmp_path):
    async with door(tmp_path) as d:
        body = (await d.post(ask(metadata={"a": "b"}, instructions="be brief", temperature=0), PATH)).json()
        assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == (
            "response",
            "completed",
            None,
            None,
        )
        assert body["output"][0]["content"][0]["text"] == GOLDEN
        assert (body["metadata"], body["instructions"], body["temperature"]) == ({"a": "b"}, "be brief", 0)
        assert body["usage"]["total_tokens"] == 18
        assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4
        again = (await d.get(f"{PATH}/{body['id']}")).json()
        assert (again["output"], again["usage"], again["status"]) == (
            body["output"],
            body["usage"],
            "completed",
        )
        assert d.script.openings[0].face == "responses"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "top_p": 0.5, "max_output_tokens": 64, "instructions": "be brief"},
        {"prompt_cache_key": "p", "top_logprobs": 0},
    ],
)
@trio_test
async def test_a_response_that_is_read_again_says_what_it_said(tmp_path, fields):
    async with door(tmp_path) as d:
        made = (await d.post(ask(**fields), PATH)).json()
        for name, value in fields.items():
            assert made[name] == value
        assert (await d.get(f"{PATH}/{made['id']}")).json() == made


@trio_test
async def test_a_name_of_the_clients_user_is_repeated_and_not_kept(tmp_path):
    async with door(tmp_path) as d:
        names = {"user": "their-1", "safety_identifier": "their-2"}
        made = (await d.post(ask(temperature=0, **names), PATH)).json()
        assert {name: made[name] for name in names} == names
        assert "their" not in d.script.openings[0].echo
        again = (await d.get(f"{PATH}/{made['id']}")).json()
        assert again == {**made, **dict.fromkeys(names)}


@trio_test
async def test_a_stream_that_is_taken_up_begins_with_what_it_said(tmp_path):
    async with door(tmp_path) as d:
        events = await streamed(d, temperature=0.25, instructions="be brief")
        name = events[0]["response"]["id"]
        resumed = (await d.get(f"{PATH}/{name}", params={"stream": "true"})).text
        assert [json.loads(e) for e in sse_events(resumed)] == events


@trio_test
async def test_a_streamed_response_has_its_events_in_order(tmp_path):
    async with door(tmp_path) as d:
        events = await streamed(d)
        kinds = [e["type"].removeprefix("response.") for e in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        numbers = [e["sequence_number"] for e in events]
        assert numbers == sorted(set(numbers))
        assert deltas(events) == events[-4]["text"] == GOLDEN
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == GOLDEN
        assert len({e["item_id"] for e in events if "item_id" in e}) == 1


@trio_test
async def test_a_response_cut_short_is_incomplete(tmp_path):
    async with door(tmp_path, Script(finish="length")) as d:
        last = (await streamed(d))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (await d.post(ask(), PATH)).json()["status"] == "incomplete"
    async with door(tmp_path, Script(finish="content_filter")) as d:
        assert (await d.post(ask(), PATH)).json()["incomplete_details"] == {"reason": "content_filter"}


@trio_test
async def test_a_response_that_fails_says_so_in_its_stream(tmp_path):
    events = [*reply_events([GOLDEN])[:2], TurnFailed(3, ErrorBody(500, "server_error", "it broke"))]
    async with door(tmp_path, Script(events=events)) as d:
        last = (await streamed(d))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}


@trio_test
async def test_a_stream_can_be_taken_up_after_any_of_its_events(tmp_path):
    async with door(tmp_path) as d:
        events = await streamed(d)
        rid = events[0]["response"]["id"]
        for seen in range(-1, len(events)):
            after = events[seen]["sequence_number"] if seen >= 0 else None
            query = {"stream": "true"} | ({"starting_after": str(after)} if after is not None else {})
            rest = [json.loads(e) for e in sse_events((await d.get(f"{PATH}/{rid}", params=query)).text)]
            assert deltas(events[: seen + 1]) + deltas(rest) == GOLDEN
            assert all(e["sequence_number"] > (after if after is not None else -1) for e in rest)
            kinds = [e["type"] for e in events[: seen + 1] + rest]
            assert [k for k in kinds if not k.endswith(".delta")] == [
                e["type"] for e in events if not e["type"].endswith(".delta")
            ]


@trio_test
async def test_a_live_stream_is_taken_up_at_another_edge_with_the_same_numbers(tmp_path):
    async with door(tmp_path, Script(hold_after=3)) as d, d.http() as client:
        async with client.stream("POST", PATH, json=ask(stream=True)) as reply:
            lines = (line async for line in reply.aiter_lines() if line.startswith("data: "))
            seen = []
            while deltas(seen) != "The capital of":
                seen.append(json.loads((await anext(lines))[6:]))
        rid = seen[0]["response"]["id"]
        await until(lambda: bool(d.script.left))
        query = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
        async with client.stream("GET", f"{PATH}/{rid}", params=query) as reply:
            await d.session.release()
            rest = [json.loads(line[6:]) async for line in reply.aiter_lines() if line.startswith("data: ")]
        assert deltas(seen) + deltas(rest) == GOLDEN
        assert rest[-1]["sequence_number"] == 64


@trio_test
async def test_the_edges_own_error_hides_no_event_from_whoever_comes_back(tmp_path):
    from actors.edge.turns import Patience

    async with (
        door(tmp_path, Script(hold_after=3), patience=Patience(reattach=0.02)) as d,
        d.http() as client,
    ):
        async with client.stream("POST", PATH, json=ask(stream=True)) as reply:
            lines = (line async for line in reply.aiter_lines() if line.startswith("data: "))
            seen = [json.loads((await anext(lines))[6:])]
            while deltas(seen) != "The capital of":
                seen.append(json.loads((await anext(lines))[6:]))
            await d.tree.kill("session.0")
            seen += [json.loads(line[6:]) async for line in lines]
        assert seen[-1]["type"] == "error"
        await d.tree.start("session.0", ScriptedSession(d.script))
        d.script.hold_after = None
        query = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
        rest = sse_events((await d.get(f"{PATH}/{seen[0]['response']['id']}", params=query)).text)
        assert deltas(seen) + deltas([json.loads(e) for e in rest]) == GOLDEN


@trio_test
async def test_a_background_response_goes_on_alone_and_is_read_later(tmp_path):
    async with door(tmp_path, Script(hold_after=2)) as d:
        body = (await d.post(ask(background=True), PATH)).json()
        assert (body["status"], body["output"], body["background"]) == ("in_progress", [], True)
        assert (await d.get(f"{PATH}/{body['id']}")).json()["status"] == "in_progress"
        await until(lambda: len(d.script.left) == 1)
        await d.session.release()
        done = (await d.get(f"{PATH}/{body['id']}")).json()
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", GOLDEN)


@trio_test
async def test_a_cancelled_response_keeps_what_it_had(tmp_path):
    async with door(tmp_path, Script(hold_after=2)) as d, d.http() as client:
        async with client.stream("POST", PATH, json=ask(stream=True)) as reply:
            parts = reply.aiter_text()
            got = await anext(parts)
            while "capital" not in got:
                got += await anext(parts)
            rid = json.loads(sse_events(got)[0])["response"]["id"]
            d.script.hold_after = None
            cancelled = (await d.post(path=f"{PATH}/{rid}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert cancelled["output"][0]["content"][0]["text"] == "The capital"
            async for part in parts:
                got += part
        last = json.loads(sse_events(got)[-1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_nothing",
        "/v1/responses/resp_01890a5d-ac96-774b-bcce-b302099a8057",
        "/v1/responses/x%00y",
    ],
)
@trio_test
async def test_an_unknown_id_is_a_404(tmp_path, path):
    async with door(tmp_path) as d:
        for answer in (
            await d.get(path),
            await d.get(path, params={"stream": "true"}),
            await d.post(path=f"{path}/cancel"),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"


@trio_test
async def test_anothers_response_is_as_unknown_as_none(tmp_path):
    async with door(tmp_path) as d:
        rid = (await d.post(ask(), PATH)).json()["id"]
        _, other = d.accounts.create_key("rival", "test")
        headers = {"authorization": f"Bearer {other}"}
        strange = rid[:-4] + ("0000" if rid[-4:] != "0000" else "1111")
        for query in ({}, {"stream": "true"}):
            theirs = await d.get(f"{PATH}/{rid}", headers=headers, params=query)
            nobodys = await d.get(f"{PATH}/{strange}", headers=headers, params=query)
            assert theirs.status_code == nobodys.status_code == 404
            assert theirs.text.replace(rid, "ID") == nobodys.text.replace(strange, "ID")
        assert (await d.post(path=f"{PATH}/{rid}/cancel", headers=headers)).status_code == 404


@trio_test
async def test_a_response_that_is_not_stored_is_not_read_again(tmp_path):
    async with door(tmp_path) as d:
        body = (await d.post(ask(store=False), PATH)).json()
        assert body["status"] == "completed"
        for path in (f"{PATH}/{body['id']}", f"{PATH}/{body['id']}?stream=true"):
            assert (await d.get(path)).status_code == 404
        assert (await d.post(path=f"{PATH}/{body['id']}/cancel")).status_code == 404


@trio_test
async def test_a_response_that_is_not_stored_is_taken_up_again_while_it_lives(tmp_path):
    async with door(tmp_path, Script(hold_after=3)) as d, d.http() as client:
        async with client.stream("POST", PATH, json=ask(store=False, stream=True)) as reply:
            lines = (line async for line in reply.aiter_lines() if line.startswith("data: "))
            seen = [json.loads((await anext(lines))[6:])]
            while deltas(seen) != "The capital of":
                seen.append(json.loads((await anext(lines))[6:]))
        path = f"{PATH}/{seen[0]['response']['id']}"
        query = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
        async with client.stream("GET", path, params=query) as reply:
            await d.session.release()
            rest = [json.loads(line[6:]) async for line in reply.aiter_lines() if line.startswith("data: ")]
        assert deltas(seen) + deltas(rest) == GOLDEN
        assert (await d.get(path)).status_code == 404


@trio_test
async def test_a_response_that_is_not_stored_can_be_cancelled(tmp_path):
    async with (
        door(tmp_path, Script(hold_after=2)) as d,
        d.http() as client,
        client.stream("POST", PATH, json=ask(store=False, stream=True)) as reply,
    ):
        lines = (line async for line in reply.aiter_lines() if line.startswith("data: "))
        rid = json.loads((await anext(lines))[6:])["response"]["id"]
        d.script.hold_after = None
        cancelled = await d.post(path=f"{PATH}/{rid}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")


FAST = (
    TextDelta(1, 0, 0, GOLDEN),
    ChoiceDone(2, 0, "stop"),
    TurnDone(3, Usage(0, 0), "2026-08/france"),
)


@trio_test
async def test_an_answer_of_the_catalog_is_marked_in_usage_and_has_no_tokens(tmp_path):
    async with door(tmp_path, Script(events=list(FAST))) as d:
        whole = (await d.post(ask(), PATH)).json()
        assert (whole["usage"]["fast_answer"], whole["usage"]["total_tokens"]) == ("2026-08/france", 0)
        final = (await streamed(d))[-1]["response"]
        assert (final["usage"]["fast_answer"], final["usage"]["total_tokens"]) == ("2026-08/france", 0)
        read = (await d.get(f"{PATH}/{whole['id']}")).json()
        assert read["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "query",
    [
        {"stream": "x"},
        {"starting_after": "x", "stream": "true"},
        {"starting_after": "5"},
        {"starting_after": "-1", "stream": "true"},
        {"colour": "red"},
    ],
)
@trio_test
async def test_a_bad_query_is_a_400(tmp_path, query):
    async with door(tmp_path) as d:
        assert (
            await d.get("/v1/responses/resp_01890a5d-ac96-774b-bcce-b302099a8057", params=query)
        ).status_code == 400


@trio_test
async def test_reading_waits_for_a_host_that_is_restarting(tmp_path):
    async with door(tmp_path) as d, trio.open_nursery() as nursery:
        rid = (await d.post(ask(), PATH)).json()["id"]
        await d.tree.kill("session.0")

        async def read() -> None:
            assert (await d.get(f"{PATH}/{rid}")).json()["status"] == "completed"

        nursery.start_soon(read)
        await trio.sleep(0.03)
        await d.tree.start("session.0", ScriptedSession(d.script))
