"""The real `openai` package against the real tree: what its users rely on."""

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

QUESTION = "What is the capital of France?"
GOLDEN = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
PLAIN = {"fast_answers": "off"}


def create(served, **options):
    body = {"model": "default", "messages": MESSAGES, "temperature": 0, "extra_body": PLAIN, **options}
    return served.client().chat.completions.create(**body)


def test_a_reply_has_the_golden_text_and_exact_usage(served):
    answer = create(served)
    choice = answer.choices[0]
    assert choice.message.content == GOLDEN
    assert (choice.finish_reason, choice.index, choice.message.role, choice.logprobs) == (
        "stop",
        0,
        "assistant",
        None,
    )
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.usage.prompt_tokens > 10


def test_a_stream_gives_the_same_text_one_role_and_one_finish(served):
    chunks = list(create(served, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(d.content or "" for d in deltas) == GOLDEN
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)
    assert all(d.content for d in deltas[1:-1])


def test_usage_comes_in_its_own_last_chunk_when_asked(served):
    chunks = list(create(served, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == create(served).usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_stop_ends_before_the_string_and_never_shows_its_beginning(served):
    answer = create(served, stop=["is Paris"])
    assert answer.choices[0].message.content == "The capital of France "
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(
        c.choices[0].delta.content or "" for c in create(served, stop=["is Paris"], stream=True)
    )
    assert streamed == "The capital of France "


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_tokens"])
def test_a_token_limit_is_kept(served, name):
    answer = create(served, **{name: 3})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert GOLDEN.startswith(answer.choices[0].message.content)


def test_a_seed_repeats_a_reply_and_another_seed_does_not(served):
    poem = [{"role": "user", "content": "Write a poem about rain."}]
    said = [
        create(served, messages=poem, temperature=1, seed=seed, max_tokens=24).choices[0].message.content
        for seed in (7, 7, 8)
    ]
    assert said[0] == said[1] != said[2]


def test_n_choices_differ_and_each_is_whole(served):
    poem = [{"role": "user", "content": "Write a poem about rain."}]
    answer = create(served, messages=poem, temperature=1, seed=7, n=3, max_tokens=12)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    assert answer.usage.completion_tokens == 36
    stream = list(create(served, messages=poem, temperature=1, seed=7, n=3, max_tokens=12, stream=True))
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


def test_logprobs_are_of_the_tokens_shown(served):
    answer = create(served, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(t.token for t in content) == GOLDEN
    assert len(content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(max(t.logprob for t in token.top_logprobs))
        assert token.token == token.top_logprobs[0].token
        assert bytes(token.bytes).decode() == token.token
    streamed = [
        t
        for c in create(served, logprobs=True, top_logprobs=3, stream=True)
        if c.choices[0].logprobs
        for t in c.choices[0].logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in content]


def test_models_lists_the_main_model_and_its_alias(served):
    ids = [m.id for m in served.client().models.list()]
    assert ids[0] == "smollm2-135m-instruct"
    assert "default" in ids
    answer = create(served, model=ids[0])
    assert answer.choices[0].message.content == GOLDEN


def test_400_names_the_field(served):
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_401_without_a_good_key(served):
    client = served.client().with_options(api_key="ak-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="default", messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"


def test_404_for_an_unknown_model(served):
    with pytest.raises(openai.NotFoundError) as caught:
        create(served, model="gpt-nothing")
    assert caught.value.code == "model_not_found"


def test_413_for_a_body_that_is_too_large(served):
    with pytest.raises(openai.APIStatusError) as caught:
        create(served, messages=[{"role": "user", "content": "x" * (20 << 20)}])
    assert caught.value.status_code == 413
    assert create(served).choices[0].message.content == GOLDEN


def test_a_prompt_over_the_context_is_refused_by_code(served):
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, messages=[{"role": "user", "content": "word " * 40_000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_every_reply_names_its_request_and_its_limits(served):
    raw = served.client().chat.completions.with_raw_response.create(
        model="default", messages=MESSAGES, temperature=0, extra_body=PLAIN
    )
    assert raw.headers["x-request-id"]
    assert int(raw.headers["x-ratelimit-remaining-requests"]) < int(raw.headers["x-ratelimit-limit-requests"])
    assert raw.headers["x-ratelimit-reset-tokens"]
    assert "server" not in raw.headers
