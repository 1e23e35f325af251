from typing import Any

import msgspec
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from supervision import wire
from supervision.envelope import Envelope
from supervision.message import REGISTRY, WhenFull, message, policy_of


@frozen
class Span:
    begin: int
    end: int


@message(repeatable=True)
class Everything:
    name: str
    count: int
    ratio: float
    raw: bytes
    yes: bool
    pair: tuple[int, str]
    many: tuple[int, ...]
    maybe: str | None
    span: Span
    spans: tuple[Span, ...] = ()


@message(repeatable=False, when_full=WhenFull.WAIT)
class Flat:
    text: str
    ratio: float = 0.5


def sent(body: Any, kind: str | None = None) -> Any:
    """What the other side makes of a message, by way of a frame of two."""
    kind = kind or policy_of(body).kind
    data = wire.encode(Envelope(0, "b", 2, "a", 1, 0, kind, -1, "owner", "trace", body))
    first, second = wire.decode(wire.frame([data, data]))
    opened = wire.open_body(first.kind, first.body)
    assert opened == wire.open_body(second.kind, second.body)
    return opened


def packed(plain: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(plain))


@message(repeatable=True)
class Whole:
    """No field may be left out."""

    text: str
    number: int
    ratio: float


texts = st.text(st.characters(codec="utf-8"), max_size=40)
spans = st.builds(Span, st.integers(0, 2**40), st.integers(0, 2**40))


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Everything,
        name=texts,
        count=st.integers(-(2**63), 2**63 - 1),
        ratio=st.floats(allow_nan=False),
        raw=st.binary(max_size=40),
        yes=st.booleans(),
        pair=st.tuples(st.integers(0, 9), texts),
        many=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
        maybe=st.none() | texts,
        span=spans,
        spans=st.lists(spans, max_size=3).map(tuple),
    )
)
def test_a_message_comes_out_as_it_went_in(everything):
    assert sent(everything) == everything


def test_the_address_comes_out_as_it_went_in():
    envelope = Envelope(1, "b", 2, "a", 1, 99, "Flat", 250, "org/user", "4bf9", None)
    (found,) = wire.decode(wire.frame([wire.encode(envelope)]))
    assert found[:-1] == envelope[:-1]


def test_a_whole_number_may_stand_for_a_float():
    opened = wire.open_body("Flat", packed({"text": "a", "ratio": 1}))
    assert opened == Flat("a", 1.0)
    assert type(opened.ratio) is float
    opened = wire.open_body("Whole", packed({"text": "a", "number": 1, "ratio": 1}))
    assert opened == Whole("a", 1, 1.0)
    assert type(opened.ratio) is float


@pytest.mark.parametrize(
    ("kind", "plain", "says"),
    [
        ("Flat", {"text": "a", "colour": 1}, "unknown field 'colour' in Flat"),
        ("Flat", {"ratio": 1.0}, "missing.*text"),
        ("Flat", {"text": 5}, "[Ee]xpected.*str.*int"),
        (
            "Whole",
            {"text": "a", "number": 1, "colour": 1},
            "Whole: .*(missing.*ratio|unknown field 'colour')",
        ),
        ("Whole", {"text": "a", "number": 1, "ratio": 1.0, "colour": 1}, "unknown field 'colour' in Whole"),
        ("Whole", {"text": "a", "number": 1}, "missing.*ratio"),
        ("Whole", {"text": "a", "number": 1.0, "ratio": 1.0}, "[Ee]xpected.*int.*float"),
        ("Whole", {"text": "a", "number": "1", "ratio": 1.0}, "[Ee]xpected.*int.*str"),
        ("Whole", {"text": "a", "number": True, "ratio": 1.0}, "[Ee]xpected.*int.*bool"),
        ("Whole", [1, 2, 3], "Whole"),
        ("Flat", ["a"], "Flat"),
        ("Flat", None, "Flat"),
        ("Everything", {"span": {"begin": 1, "end": 2, "colour": 1}}, "Everything: (missing|unknown) field"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_name(kind, plain, says):
    with pytest.raises(wire.MalformedMessage, match=says):
        wire.open_body(kind, packed(plain))


def test_an_unknown_field_deep_inside_is_refused_by_name():
    plain = msgspec.to_builtins(
        Everything("n", 1, 1.0, b"", True, (1, "a"), (), None, Span(1, 2)), builtin_types=(bytes,)
    )
    plain["span"]["colour"] = "red"
    with pytest.raises(wire.MalformedMessage, match="unknown field 'colour' in Span"):
        wire.open_body("Everything", packed(plain))
    del plain["span"]["colour"]
    plain["count"] = "1"
    with pytest.raises(wire.MalformedMessage, match="wants int, not str"):
        wire.open_body("Everything", packed(plain))


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(wire.UnknownKind, match="'Nonsense'"):
        wire.open_body("Nonsense", packed({}))


def test_no_message_is_none():
    assert wire.open_body("", packed(None)) is None


def test_a_message_over_the_limit_is_refused_before_it_is_sent():
    envelope = Envelope(0, "b", 2, "a", 1, 0, "Flat", -1, "", "", Flat("x" * wire.MAX_MESSAGE))
    with pytest.raises(wire.MessageTooLarge, match="Flat to b is 16"):
        wire.encode(envelope)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdc\x00\x02\x90", b"\x91\x91\x00", b"\x80", b"hello"])
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(wire.MalformedFrame):
        wire.decode(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_refusal(data):
    try:
        envelopes = wire.decode(data)
    except wire.MalformedFrame:
        return
    for envelope in envelopes:
        try:
            wire.open_body(envelope.kind, envelope.body)
        except wire.WireError:
            continue


def test_a_kind_belongs_to_one_module():
    with pytest.raises(ValueError, match="'Flat' is defined twice"):
        message(repeatable=True)(type("Flat", (), {"__module__": "elsewhere", "__annotations__": {}}))
    assert REGISTRY["Flat"] is Flat


def test_only_messages_have_a_policy():
    assert policy_of(Flat).when_full is WhenFull.WAIT
    with pytest.raises(TypeError, match="declare its class with @message"):
        policy_of("text")
