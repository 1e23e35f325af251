"""The real `openai` package, unchanged, against the edge."""

import openai
import pytest

from actors.protocol import ErrorBody
from tests.actors.edge.harness import GOLDEN, MESSAGES, Script, door, reply_events, trio_test


def ask(client: openai.OpenAI, **options):
    return client.chat.completions.create(model="default", messages=MESSAGES, **options)


@trio_test
async def test_a_whole_and_a_streamed_reply(tmp_path):
    async with door(tmp_path) as d:
        whole = await d.sdk(ask)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (GOLDEN, "stop")
        chunks = await d.sdk(lambda c: list(ask(c, stream=True, stream_options={"include_usage": True})))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == GOLDEN
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 18)
        assert all(c.usage is None for c in chunks[:-1])
        assert len({(c.id, c.created, c.model) for c in chunks}) == 1


@trio_test
async def test_logprobs_are_parsed(tmp_path):
    async with door(tmp_path, Script(events=reply_events([GOLDEN], logprobs=True))) as d:
        whole = await d.sdk(lambda c: ask(c, logprobs=True, top_logprobs=1))
        assert "".join(t.token for t in whole.choices[0].logprobs.content) == GOLDEN


@trio_test
async def test_a_stored_completion_is_retrieved(tmp_path):
    async with door(tmp_path) as d:
        made = await d.sdk(lambda c: ask(c, store=True, metadata={"topic": "towns"}, n=2))
        again = await d.sdk(lambda c: c.chat.completions.retrieve(made.id))
        assert (again.id, again.choices, again.usage) == (made.id, made.choices, made.usage)
        assert again.metadata == {"topic": "towns"}
        unstored = await d.sdk(ask)
        with pytest.raises(openai.NotFoundError) as caught:
            await d.sdk(lambda c: c.chat.completions.retrieve(unstored.id))
        assert unstored.id in caught.value.message


@trio_test
async def test_responses_whole_streamed_and_taken_up(tmp_path):
    async with door(tmp_path) as d:
        whole = await d.sdk(lambda c: c.responses.create(model="default", input="hi"))
        assert whole.output_text == GOLDEN
        events = await d.sdk(lambda c: list(c.responses.create(model="default", input="hi", stream=True)))
        assert events[-1].response.output_text == GOLDEN
        again = await d.sdk(lambda c: c.responses.retrieve(events[0].response.id))
        assert again.output_text == GOLDEN
        rest = await d.sdk(
            lambda c: list(
                c.responses.retrieve(again.id, stream=True, starting_after=events[5].sequence_number)
            )
        )
        assert [e.sequence_number for e in rest][-1] == events[-1].sequence_number
        background = await d.sdk(lambda c: c.responses.create(model="default", input="hi", background=True))
        assert (await d.sdk(lambda c: c.responses.cancel(background.id))).id == background.id


@trio_test
async def test_the_responses_stream_helper_accumulates(tmp_path):
    def use(client: openai.OpenAI):
        with client.responses.stream(model="default", input="hi") as stream:
            stream.until_done()
            return stream.get_final_response()

    async with door(tmp_path) as d:
        assert (await d.sdk(use)).output_text == GOLDEN


@trio_test
async def test_the_sdks_own_websocket(tmp_path):
    def use(client: openai.OpenAI):
        with client.responses.connect() as connection:
            connection.response.create(model="default", input="hi")
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.completed":
                    return text
        return None

    async with door(tmp_path) as d:
        assert await d.sdk(use) == GOLDEN


@trio_test
async def test_models_and_moderations(tmp_path):
    async with door(tmp_path, kinds=("safety.0",)) as d:
        assert [m.id for m in await d.sdk(lambda c: list(c.models.list()))] == ["small", "default"]
        assert (await d.sdk(lambda c: c.models.retrieve("default"))).created == 1700000000
        found = await d.sdk(lambda c: c.moderations.create(input=["hello", "kill"]))
        assert [r.flagged for r in found.results] == [False, True]
        assert found.results[1].categories.violence
        assert not found.results[1].categories.hate


STATUSES = [
    (
        ErrorBody(429, "requests", "slow down", "", "rate_limit_exceeded", (("retry-after", "1"),)),
        openai.RateLimitError,
    ),
    (
        ErrorBody(400, "invalid_request_error", "too long", "messages", "context_length_exceeded"),
        openai.BadRequestError,
    ),
    (
        ErrorBody(503, "service_unavailable_error", "full", "", "server_is_overloaded"),
        openai.InternalServerError,
    ),
    (ErrorBody(404, "invalid_request_error", "none", "model", "model_not_found"), openai.NotFoundError),
]


@pytest.mark.parametrize(("body", "kind"), STATUSES, ids=lambda v: str(getattr(v, "status", "")))
@pytest.mark.parametrize("stream", [True, False])
@trio_test
async def test_a_refusal_comes_before_the_200_and_is_the_sdks_exception(tmp_path, body, kind, stream):
    async with door(tmp_path, Script(refuse=body)) as d:
        with pytest.raises(kind) as caught:
            await d.sdk(lambda c: ask(c, stream=stream))
        assert (caught.value.status_code, caught.value.code, caught.value.param) == (
            body.status,
            body.code or None,
            body.param or None,
        )


@trio_test
async def test_a_broken_stream_is_an_api_error(tmp_path):
    from actors.protocol import TurnFailed

    events = [*reply_events([GOLDEN])[:2], TurnFailed(3, ErrorBody(500, "server_error", "it broke"))]
    async with door(tmp_path, Script(events=events)) as d:
        with pytest.raises(openai.APIError, match="it broke"):
            await d.sdk(lambda c: list(ask(c, stream=True)))


@trio_test
async def test_a_wrong_key_and_an_unknown_model(tmp_path):
    async with door(tmp_path) as d:
        with pytest.raises(openai.AuthenticationError) as caught:
            await d.sdk(lambda c: ask(c.with_options(api_key="wrong")))
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as missing:
            await d.sdk(lambda c: c.chat.completions.create(model="x", messages=MESSAGES))
        assert missing.value.code == "model_not_found"


@trio_test
async def test_the_sdks_retry_is_told_from_a_new_request(tmp_path):
    async with door(tmp_path, Script(refuse=ErrorBody(503, "service_unavailable_error", "full"))) as d:
        with pytest.raises(openai.InternalServerError):
            await d.sdk(lambda c: ask(c.with_options(max_retries=1)))
        first, second = d.script.openings
        assert (first.is_retry, second.is_retry) == (False, True)
        assert first.body_digest == second.body_digest
