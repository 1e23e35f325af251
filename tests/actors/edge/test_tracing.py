"""Abuse is traced to a key and its end user by the log, which has marks and no names."""

import pytest

from actors.edge.tracing import mark
from actors.protocol import ErrorBody
from tests.actors.edge.harness import Script, chat, door, reply_events, trio_test, until

REJECTED = ErrorBody(400, "invalid_request_error", "rejected", "messages", "content_policy_violation")


def lines(caplog) -> list[tuple[str, dict]]:
    return [(r.getMessage(), r.fields) for r in caplog.records if r.name == "actors.edge.tracing"]


@pytest.fixture
def log(caplog):
    caplog.set_level("INFO", "actors.edge.tracing")
    return caplog


def test_a_mark_tells_labels_and_owners_apart():
    assert mark("acme", "ann") == "58158820c40bcd7c"
    assert len({mark("acme", "ann"), mark("acme", "bob"), mark("other", "ann")}) == 3


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"user": "ann@x"}, ["ann@x"]),
        ({"safety_identifier": "s1"}, ["s1"]),
        ({"user": "ann@x", "safety_identifier": "s1"}, ["s1", "ann@x"]),
        ({"user": "s1", "safety_identifier": "s1"}, ["s1"]),
    ],
)
@trio_test
async def test_a_turn_of_an_end_user_is_a_line_and_a_turn_of_nobody_is_none(tmp_path, log, fields, labels):
    async with door(tmp_path) as d:
        await d.post(chat())
        await d.post(chat(user=""))
        assert lines(log) == []
        await d.post(chat(**fields))
        await d.post({"model": "default", "input": "hi", **fields}, "/v1/responses")
        opening = d.script.openings[2]
        marks = " ".join(mark("acme", label) for label in labels)
        assert [(facts["end_user"], facts["owner"]) for _, facts in lines(log)] == [(marks, "acme")] * 2
        _, facts = lines(log)[0]
        assert (facts["request_id"], facts["turn"]) == (opening.request_id, opening.request_id)
        assert facts["key_id"] == opening.key_id
        assert opening.user == marks
    assert "ann@x" not in str(lines(log))


@trio_test
async def test_a_request_that_the_safety_policy_refuses_is_a_line(tmp_path, log):
    async with door(tmp_path, Script(refuse=REJECTED)) as d:
        assert (await d.post(chat(user="ann"))).status_code == 400
        await d.post(chat())
        d.script.refuse = ErrorBody(503, "service_unavailable_error", "full")
        await d.post(chat(user="ann"))
        assert [(text, f["end_user"]) for text, f in lines(log)] == [
            ("the safety policy refused a request", mark("acme", "ann")),
            ("the safety policy refused a request", ""),
        ]
        assert [f["request_id"] for _, f in lines(log)] == [o.request_id for o in d.script.openings[:2]]


@pytest.mark.parametrize("stream", [True, False])
@trio_test
async def test_a_reply_that_the_safety_policy_cuts_off_is_a_line(tmp_path, log, stream):
    async with door(tmp_path, Script(events=reply_events(["a b", "c"], "content_filter"), twice=True)) as d:
        await d.post(chat(safety_identifier="ann", n=2, stream=stream))
        await until(lambda: len(lines(log)) == 2)
        text, facts = lines(log)[-1]
        assert text == "the safety policy cut off a reply"
        assert (facts["end_user"], facts["choices"]) == (mark("acme", "ann"), [0, 1])
        assert facts["turn"] == d.script.openings[0].request_id
