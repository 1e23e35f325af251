"""Who may come in, what is said at the door, and the pages for operators."""

import json

import pytest

from actors.edge.tracing import mark
from tests.actors.edge.harness import MESSAGES, Script, chat, door, trio_test, until

NEEDED = ("safety.0", "router", "limiter", "ledger", "batcher.0")
KEYLESS = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": "Basic eDp5"},
    {"authorization": "Bearer " + "x" * 5000},
    {"authorization": "Bearer \x7f"},
]


@pytest.mark.parametrize("headers", KEYLESS, ids=str)
@trio_test
async def test_nothing_of_v1_is_served_without_a_good_key(tmp_path, headers):
    async with door(tmp_path) as d:
        import httpx

        async with httpx.AsyncClient(base_url=d.root, headers=headers) as client:
            for method, path in [
                ("POST", "/v1/chat/completions"),
                ("POST", "/v1/responses"),
                ("GET", "/v1/models"),
                ("GET", "/v1/models/default"),
                ("POST", "/v1/moderations"),
                ("GET", "/v1/responses/resp_x"),
                ("GET", "/v1/chat/completions/chatcmpl-x"),
                ("POST", "/v1/responses/resp_x/cancel"),
            ]:
                answer = await client.request(method, path)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["x-request-id"]
        assert d.script.openings == []


@trio_test
async def test_a_revoked_key_is_refused_at_once(tmp_path):
    async with door(tmp_path) as d:
        key_id, secret = d.accounts.create_key("acme", "second")
        headers = {"authorization": f"Bearer {secret}"}
        assert (await d.get("/v1/models", headers=headers)).status_code == 200
        d.accounts.revoke(key_id)
        assert (await d.get("/v1/models", headers=headers)).status_code == 401


@trio_test
async def test_a_key_that_may_only_read_asks_for_nothing(tmp_path):
    async with door(tmp_path) as d:
        _, secret = d.accounts.create_key("acme", "reader", read_only=True)
        headers = {"authorization": f"Bearer {secret}"}
        refused = await d.post(chat(), headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert (await d.get("/v1/models", headers=headers)).status_code == 200


@trio_test
async def test_a_turn_is_its_keys_and_never_what_the_body_says(tmp_path):
    async with door(tmp_path) as d:
        await d.post(chat(user="root"), headers={"x-client-request-id": "label"})
        opening = d.script.openings[0]
        assert (opening.owner, opening.user) == ("acme", mark("acme", "root"))
        assert opening.request_id != "label"


@trio_test
async def test_fast_answers_need_the_keys_consent(tmp_path):
    async with door(tmp_path) as d:
        _, secret = d.accounts.create_key("acme", "plain", fast_answers=False)
        await d.post(chat())
        await d.post(chat(fast_answers="off"))
        await d.post(chat(messages=[{"role": "system", "content": "x"}, *MESSAGES]))
        await d.post(chat(), headers={"authorization": f"Bearer {secret}"})
        assert [o.fast_answers for o in d.script.openings] == [True, False, False, False]


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json5",
    ],
)
@trio_test
async def test_a_wrong_content_type_is_a_400(tmp_path, kind):
    async with door(tmp_path) as d:
        answer = await d.post(content=json.dumps(chat()).encode(), headers={"content-type": kind})
        assert answer.status_code == 400
        assert answer.headers["x-should-retry"] == "false"
        await d.golden()


@trio_test
async def test_a_charset_is_fine_and_a_compressed_body_is_not(tmp_path):
    async with door(tmp_path) as d:
        data = json.dumps(chat()).encode()
        for extra, status in (
            ({"content-type": "application/json; charset=utf-8"}, 200),
            ({"content-type": "application/json", "content-encoding": "gzip"}, 400),
        ):
            assert (await d.post(content=data, headers=extra)).status_code == status


ALLOWED = {
    "/v1/chat/completions": "OPTIONS, POST",
    "/v1/models": "GET, HEAD, OPTIONS",
    "/v1/chat/completions/chatcmpl-x": "GET, HEAD, OPTIONS",
}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("DELETE", "/v1/chat/completions/chatcmpl-x", 405),
        ("POST", "/v1/chat/completions/chatcmpl-x", 405),
        ("GET", "/v1/chat/completions/chatcmpl-x/messages", 404),
        ("GET", "/v1/models/no/such", 404),
        ("GET", "/static/x", 404),
    ],
)
@trio_test
async def test_an_unknown_url_is_a_json_error(tmp_path, method, path, status):
    async with door(tmp_path) as d, d.http() as client:
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert answer.headers.get("allow", "") == ALLOWED.get(path, "")
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@trio_test
async def test_a_bug_is_a_500_that_tells_nothing_and_logs_no_text(tmp_path, monkeypatch, caplog):
    from actors.edge import chat_completions

    def fail(*_):
        raise RuntimeError(json.dumps(chat()))

    async with door(tmp_path) as d:
        with monkeypatch.context() as patch:
            patch.setattr(chat_completions, "parse", fail)
            answer = await d.post(chat())
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "France" not in answer.text + caplog.text
        assert "RuntimeError" in caplog.text
        await d.golden()


@trio_test
async def test_ready_means_that_all_that_a_turn_needs_answers(tmp_path, monkeypatch):
    from actors.edge import health

    monkeypatch.setattr(health, "FRESH", 0.0)
    async with door(tmp_path, kinds=NEEDED) as d:
        assert (await d.get("/health/live")).status_code == 200
        assert (await d.get("/health/ready")).status_code == 200
        for kind in NEEDED:
            await d.tree.kill(kind)
            answer = await d.get("/health/ready")
            assert answer.status_code == 503
            assert kind.split(".")[0] in answer.json()["missing"]
        assert (await d.get("/health/live")).status_code == 200


@trio_test
async def test_metrics_have_every_actors_lines(tmp_path):
    async with door(tmp_path, kinds=("safety.0",)) as d:
        await d.post(chat())
        await d.post(chat(temperature=9))
        lines = (await d.get("/metrics")).text.splitlines()
        assert "session_up 1" in lines
        assert "answering_up 1" in lines
        assert 'antiphon_up{actor="edge.0"} 1' in lines
        assert (
            'antiphon_edge_requests_total{actor="edge.0",route="/v1/chat/completions",status="400"} 1'
            in lines
        )
        assert 'antiphon_edge_turns_open{actor="edge.0"} 0' in lines


@trio_test
async def test_metrics_can_be_kept_for_administrators(tmp_path):
    async with door(tmp_path, metrics_need_admin=True) as d:
        _, admin = d.accounts.create_key("ops", "admin", admin=True)
        assert (await d.get("/metrics")).status_code == 403
        assert (await d.get("/metrics", headers={"authorization": f"Bearer {admin}"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": []},
        {"input": [5]},
        {"input": [["x"]]},
        {"input": "x", "colour": "red"},
        {"input": [{"type": "image_url", "image_url": {}}]},
    ],
)
@trio_test
async def test_a_bad_moderation_is_a_400(tmp_path, body):
    async with door(tmp_path, kinds=("safety.0",)) as d:
        assert (await d.post(body, "/v1/moderations")).status_code == 400


@trio_test
async def test_no_checker_is_not_a_pass(tmp_path):
    async with door(tmp_path) as d:
        assert (await d.post({"input": "x"}, "/v1/moderations")).status_code == 503


@trio_test
async def test_the_labels_of_five_requests_make_five_turns(tmp_path):
    async with door(tmp_path) as d:
        answers = [await d.post(chat(), headers={"x-client-request-id": "same"}) for _ in range(5)]
        assert (
            len({a.json()["id"] for a in answers}) == len({a.headers["x-request-id"] for a in answers}) == 5
        )


@trio_test
async def test_a_client_that_closes_after_done_has_finished(tmp_path):
    async with door(tmp_path, Script()) as d:
        for _ in range(5):
            await d.post(chat(stream=True))
        await until(lambda: not list(d.edge._turns.readers()))
        assert d.script.left == []
