"""What a request may say: every field is honoured or refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.edge import chat_completions, responses
from actors.edge.chat_completions import Bounds, Models
from actors.edge.errors import ApiError, encode
from actors.edge.sampling import ModelInfo
from actors.edge.validation import MAX_DEPTH, parse_object
from tests.actors.edge.harness import MESSAGES, MODEL

MODELS = Models((MODEL,))


def read(**fields):
    return chat_completions.parse({"model": "default", "messages": MESSAGES, **fields}, MODELS, Bounds())


def refusal(call) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    json.loads(encode(caught.value.body))
    return caught.value


NOT_JSON = {
    "empty": b"",
    "blank": b"  \n",
    "null": b"null",
    "array": b"[]",
    "string": b'"str"',
    "number": b"5",
    "half": b'{"model": "def',
    "trailing": b"{} x",
    "two": b"{}{}",
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": Infinity}',
    "minus infinity": b'{"a": -Infinity}',
    "overflow": b'{"a": 1e999}',
    "minus overflow": b'{"a": -1e999}',
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "decimals": b'{"a": 0.' + b"9" * 5000 + b"}",
    "not utf-8": b'{"a": "\xff"}',
    "overlong": b'{"a": "\xc0\x80"}',
    "raw surrogate": b'{"a": "\xed\xa0\x80"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"a": 1}',
    "high surrogate": b'{"a": "\\ud800"}',
    "low surrogate": b'{"a": "x\\uDC00y"}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "surrogates the wrong way round": b'{"a": "\\udc00\\ud800"}',
    "nul": b'{"a": "x\\u0000"}',
    "raw nul": b'{"a": "x\x00"}',
    "nul in a key": b'{"a\\u0000": 1}',
    "raw newline": b'{"a": "x\ny"}',
    "duplicate": b'{"a": 1, "a": 1}',
    "inner duplicate": b'{"b": [{"a": 1, "a": 2}]}',
    "duplicate by escape": b'{"a": 1, "\\u0061": 1}',
    "deep arrays": b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep and open": b"[" * 100_000,
    "quotes without end": b'{"a": "' + b'\\"' * 100_000,
    "comment": b"{/* x */}",
    "single quotes": b"{'a': 1}",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_a_body_that_other_parsers_would_read_differently_is_refused(name):
    assert refusal(lambda: parse_object(NOT_JSON[name])).body.status == 400


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud83c\\udf89"}', '{"a": "🎉 \\\\u0000 \\\\ud800"}', '{"a": "\\"[[[[\\\\"}']
)
def test_lawful_escapes_pass(text):
    assert parse_object(text.encode()) == json.loads(text)


def test_nesting_up_to_the_limit_passes_and_brackets_in_strings_do_not_count():
    deep = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert parse_object(deep.encode()) == json.loads(deep)
    many = json.dumps({"a": "[{" * 5000, "b": [[]] * 500})
    assert parse_object(many.encode()) == json.loads(many)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=5),
        json_values,
        max_size=5,
    )
)
def test_lawful_json_is_read_as_it_was_written(value):
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(data):
    found: dict | ApiError
    try:
        found = parse_object(data)
    except ApiError as error:
        found = error
    assert isinstance(found, dict) or (found.body.status == 400 and json.loads(encode(found.body)))


BAD = [
    ("model", None),
    ("model", ""),
    ("model", 5),
    ("model", ["default"]),
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [5]),
    ("messages", [{}]),
    ("messages", [None]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": []}]),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    ("messages", [{"role": ["user"], "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
    ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
    ("messages", [{"role": "user", "content": "x"}] * 5000),
    ("logit_bias", {"1000": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"AI": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": None}),
    ("logit_bias", [1]),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {str(i): 1 for i in range(1025)} | {}),
    ("logit_bias", {"9" * 5000: 1}),
    ("stop_token_ids", [1000]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", 5),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", -1),
    ("top_p", 1.01),
    ("top_k", 0.01),
    ("top_k", -2),
    ("top_k", 9999999),
    ("min_p", 2),
    ("min_p", -1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("min_tokens", -1),
    ("min_tokens", 4000),
    ("ignore_eos", 1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", "1"),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("n", 10**30),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2049),
    ("max_tokens", 10**50),
    ("max_completion_tokens", 1e300),
    ("max_completion_tokens", "5"),
    ("stop", []),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 5),
    ("stop", 5),
    ("stop", [5]),
    ("stop", "x" * 2000),
    ("logprobs", 1),
    ("logprobs", "true"),
    ("top_logprobs", 21),
    ("top_logprobs", 5),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "x"),
    ("metadata", ["a"]),
    ("metadata", {"a": 5}),
    ("metadata", {"k" * 65: "x"}),
    ("metadata", {"a": "x" * 513}),
    ("metadata", {str(i): "" for i in range(17)}),
    ("metadata", {"kept": "nowhere"}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", "text"),
    ("response_format", []),
    ("tools", [{"type": "function"}]),
    ("tools", {}),
    ("functions", [{}]),
    ("tool_choice", "required"),
    ("function_call", {"name": "f"}),
    ("parallel_tool_calls", "x"),
    ("modalities", ["audio"]),
    ("modalities", ["text", "audio"]),
    ("audio", {}),
    ("prediction", {}),
    ("web_search_options", {}),
    ("reasoning_effort", "high"),
    ("verbosity", "high"),
    ("service_tier", "flex"),
    ("service_tier", "priority"),
    ("store", "yes"),
    ("user", 5),
    ("safety_identifier", []),
    ("prompt_cache_key", 5),
    ("prompt_cache_retention", "24h"),
    ("fast_answers", "on"),
    ("fast_answers", True),
    ("moderation", {"model": "x"}),
    ("include_stop_str_in_output", "x"),
    ("best_of", 2),
    ("grammar", "x"),
    ("", 1),
    ("é", 1),
    ("\ud800", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: ascii(v)[:40])
def test_a_bad_value_is_refused_and_named(field, value):
    body = refusal(lambda: read(**{field: value})).body
    assert body.status == 400
    assert body.type == "invalid_request_error"
    if field.isascii():
        assert body.param.split(".")[0].split("[")[0] == field


def test_stream_options_name_what_they_refuse():
    assert refusal(lambda: read(stream=True, stream_options={"x": 1})).body.param == "stream_options.x"
    assert (
        refusal(lambda: read(stream=True, stream_options={"include_obfuscation": True})).body.param
        == "stream_options.include_obfuscation"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {
            "temperature": None,
            "top_p": None,
            "n": None,
            "stop": None,
            "stream": None,
            "seed": None,
            "logit_bias": None,
            "metadata": None,
            "user": None,
        },
        {
            "tools": [],
            "functions": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "function_call": "none",
        },
        {
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "reasoning_effort": "none",
            "verbosity": "medium",
            "service_tier": "auto",
        },
        {"logit_bias": {}, "metadata": {}, "stop_token_ids": [], "stream": True, "stream_options": {}},
    ],
)
def test_values_that_change_nothing_pass(fields):
    plain, given_ = read(seed=1), read(**{"seed": 1, **{k: v for k, v in fields.items() if k != "seed"}})
    assert given_.params == plain.params
    assert (given_.n, given_.extras) == (plain.n, plain.extras)


def test_every_sampling_field_arrives():
    asked = read(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": 3, "5": -100},
        seed=-1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        logprobs=True,
        top_logprobs=4,
        max_completion_tokens=9,
        n=2,
        stop=["a", "b"],
        include_stop_str_in_output=True,
        prompt_cache_key="k",
        user="u",
        safety_identifier="s",
        metadata={"a": "b"},
        store=True,
        stream=True,
        stream_options={"include_usage": True},
        fast_answers="off",
    )
    p = asked.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.0, 0.5, 7, 0.1)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (1.0, -1.0, 1.2)
    assert (p.logit_bias, p.seed, p.min_tokens, p.ignore_eos) == (((5, -100.0), (7, 3.0)), 2**64 - 1, 2, True)
    assert (p.stop_token_ids, p.logprobs, p.max_tokens) == ((3,), 4, 9)
    assert (asked.n, asked.extras.stop, asked.extras.include_stop) == (2, ("a", "b"), True)
    assert (asked.prompt_cache_key, asked.end_user, asked.metadata) == ("k", ("s", "u"), (("a", "b"),))
    assert (asked.store, asked.stream, asked.include_usage) == (True, True, True)
    assert not asked.answerable_at_once


def test_an_unset_seed_is_minted_and_an_unset_limit_is_whatever_fits():
    first, second = read(), read()
    assert first.params.seed != second.params.seed
    assert first.params.max_tokens == 0
    assert first.params.logprobs == -1


def test_a_top_p_of_zero_keeps_the_likeliest_token():
    assert 0 < read(top_p=0).params.top_p < 1e-3


def test_choices_times_tokens_are_bounded():
    assert (
        refusal(
            lambda: chat_completions.parse(
                {"model": "default", "messages": MESSAGES, "n": 100, "max_tokens": 2000},
                MODELS,
                Bounds(generated=10_000),
            )
        ).body.param
        == "n"
    )


def test_the_old_and_the_new_limit_must_agree():
    assert read(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert refusal(lambda: read(max_tokens=5, max_completion_tokens=6)).body.param == "max_tokens"


def test_roles_and_parts_are_mapped():
    asked = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "ann",
            },
            {"role": "user", "content": ""},
            {
                "role": "assistant",
                "content": "yes",
                "refusal": None,
                "tool_calls": [],
                "annotations": [],
                "audio": None,
            },
        ]
    )
    assert [(m.role, m.content, m.name) for m in asked.messages] == [
        ("system", "be brief", ""),
        ("user", "ab", "ann"),
        ("user", "", ""),
        ("assistant", "yes", ""),
    ]


def test_only_a_first_plain_question_may_be_answered_at_once():
    assert read().answerable_at_once
    assert read(stream=True, max_tokens=50, store=True).answerable_at_once
    assert read(temperature=1, top_p=1.0, top_k=0, presence_penalty=0, min_p=0, n=1).answerable_at_once
    assert read(tools=[], response_format={"type": "text"}, stop=None, seed=None).answerable_at_once
    assert not read(messages=[{**MESSAGES[0], "name": "ann"}]).answerable_at_once
    for fields in (
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"seed": 7},
        {"min_tokens": 1},
        {"ignore_eos": True},
        {"stop_token_ids": [3]},
        {"store": False},
        {"messages": [{"role": "system", "content": "be brief"}, *MESSAGES]},
        {"messages": [{"role": "developer", "content": "be brief"}]},
        {"messages": [{"role": "assistant", "content": "yes?"}]},
        {"n": 2},
        {"logprobs": True},
        {"stop": "x"},
        {"logit_bias": {"5": 1}},
        {"messages": [*MESSAGES, *MESSAGES]},
        {"fast_answers": "off"},
    ):
        assert not read(**fields).answerable_at_once


def test_a_response_may_be_answered_at_once_unless_it_has_context_or_is_not_to_be_kept():
    assert respond().answerable_at_once
    assert respond(store=True, background=True).answerable_at_once
    for fields in ({"instructions": "be brief"}, {"store": False}, {"temperature": 0}, {"seed": 1}):
        assert not respond(**fields).answerable_at_once


def test_an_unknown_model_is_a_404():
    body = refusal(lambda: read(model="gpt-nothing")).body
    assert (body.status, body.code, body.param) == (404, "model_not_found", "model")


def test_models_are_known_by_every_name():
    models = Models((ModelInfo("a", ("b", "c")),))
    assert models.get("c").name == "a"
    assert [m["id"] for m in models.listed()] == ["a", "b", "c"]


def respond(**fields):
    return responses.parse({"model": "default", "input": "hi", **fields}, MODELS, Bounds())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None),
        ("input", []),
        ("input", 5),
        ("input", [{"role": "user"}]),
        ("input", [{"type": "function_call_output"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("instructions", 5),
        ("max_output_tokens", 0),
        ("previous_response_id", "resp_x"),
        ("conversation", "c"),
        ("prompt", {}),
        ("truncation", "auto"),
        ("reasoning", {"effort": "high"}),
        ("text", {"format": {"type": "json_schema"}}),
        ("tools", [{}]),
        ("include", ["file_search_call.results"]),
        ("top_logprobs", 3),
        ("background", "yes"),
        ("messages", MESSAGES),
        ("max_tokens", 5),
        ("n", 2),
        ("metadata", ["a"]),
        ("stream_options", {}),
    ],
)
def test_a_bad_value_of_a_response_is_refused_and_named(field, value):
    body = refusal(lambda: respond(**{field: value})).body
    assert (body.status, body.param.split(".")[0].split("[")[0]) == (400, field)


def test_a_response_must_be_stored_to_run_in_the_background():
    assert respond(background=True).store
    assert not respond(store=False).store
    assert refusal(lambda: respond(store=False, background=True)).body.param == "store"


def test_a_response_is_read():
    asked = respond(
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "ho", "annotations": []}],
            },
        ],
        max_output_tokens=5,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert [(m.role, m.content) for m in asked.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "ho"),
    ]
    assert (asked.params.max_tokens, asked.params.logprobs, asked.params.temperature) == (5, 2, 0.0)
