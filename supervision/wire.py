"""The codec: envelopes to bytes and back, many to a frame.

An envelope is a MessagePack array, its body a map by field name. A frame is an array of envelopes, so a
frame is made by joining envelopes that were encoded, and measured, when they were sent. msgspec writes
attrs classes as they are. A body stays packed until it is wanted; then msgspec reads classes that hold no
other class, and one cattrs converter the rest. Neither takes an unknown field or converts a type silently.
Frames travel between processes of one installation, so there is no version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
import msgspec
from cattrs.errors import ForbiddenExtraKeysError

from supervision.envelope import Body, Envelope
from supervision.errors import SupervisionError
from supervision.message import REGISTRY

MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes of one encoded envelope. Anything larger belongs in `store`, with a message that names it."""

MAX_FRAME = MAX_MESSAGE + 1024
"""What a socket must take: one largest envelope and the frame's head."""

MAX_ENVELOPES = 256
"""Envelopes a frame may carry: past it the cost per message falls no further."""

FRAME_TARGET = 256 * 1024
"""Bytes after which no further envelope joins a frame; a larger one travels alone."""


class WireError(SupervisionError):
    """Base of what the codec refuses."""


class MessageTooLarge(WireError):
    """An encoded message is over `MAX_MESSAGE`. It was not sent."""


class UnknownKind(WireError):
    """No message class is registered under the kind."""


class MalformedMessage(WireError):
    """The body does not fit its class: a field that is unknown, missing or of another type."""


class MalformedFrame(WireError):
    """The bytes are not a frame."""


_LEAVES = (str, int, float, bool, bytes, NoneType)


def _strictly(leaf: type) -> Callable[[Any, Any], Any]:
    def take(value: Any, _: Any) -> Any:
        if type(value) is not leaf:
            raise TypeError(f"wants {leaf.__name__}, not {type(value).__name__}")
        return value

    return take


def _strict_float(value: Any, _: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"wants float, not {type(value).__name__}")
    return float(value)


def _is_leaf(kind: Any) -> bool:
    """Whether values of this type hold no attrs class, so that msgspec can check all of it at once."""
    if kind in _LEAVES:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return True
    if origin in (tuple, list, Union, UnionType):
        return all(arg is Ellipsis or _is_leaf(arg) for arg in get_args(kind))
    return isinstance(kind, type) and issubclass(kind, Enum)


@cache
def _is_flat(kind: Any) -> bool:
    if not (isinstance(kind, type) and attrs.has(kind)):
        return False
    attrs.resolve_types(kind)
    return all(_is_leaf(field.type) and not field.converter for field in attrs.fields(kind))


def _flat_hook(kind: type) -> Callable[[Any, Any], Any]:
    fields = attrs.fields(kind)
    allowed = frozenset(field.name for field in fields)
    names, types = tuple(field.name for field in fields), tuple(field.type for field in fields)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is dict and tuple(value) == names and tuple(map(type, value.values())) == types:
            return kind(*value.values())  # what our own encoder writes, scalars only: nothing to convert
        if type(value) is dict and not allowed.issuperset(value):
            raise ForbiddenExtraKeysError(None, kind, set(value) - allowed)
        return msgspec.convert(value, kind)

    return structure


def make_converter() -> cattrs.Converter:
    """Return the strict converter of messages and settings: unknown fields refused, no silent conversion."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    for leaf in (str, int, bool, bytes):
        converter.register_structure_hook(leaf, _strictly(leaf))
    converter.register_structure_hook(float, _strict_float)
    converter.register_structure_hook_factory(_is_flat, _flat_hook)
    return converter


CONVERTER = make_converter()
_ENCODER = msgspec.msgpack.Encoder(enc_hook=CONVERTER.unstructure)
_DECODER = msgspec.msgpack.Decoder(list[Envelope])
_PLAIN, _TEXT = msgspec.msgpack.Decoder(), msgspec.msgpack.Decoder(str)
_HEAD = struct.Struct(">BH")


def encode(envelope: Envelope) -> bytes:
    """Return the envelope's bytes. Raises `MessageTooLarge`, naming kind and size."""
    data = _ENCODER.encode(envelope)
    if len(data) > MAX_MESSAGE:
        raise MessageTooLarge(
            f"{envelope.kind} to {envelope.to} is {len(data)} bytes; at most {MAX_MESSAGE} go"
        )
    return data


def frame(envelopes: Sequence[bytes]) -> bytes:
    """Return one frame of encoded envelopes, at most `MAX_ENVELOPES` of them."""
    return b"".join((_HEAD.pack(0xDC, len(envelopes)), *envelopes))  # one copy, not two


def decode(data: bytes) -> list[Envelope]:
    """Return a frame's envelopes, their bodies still packed. Raises `MalformedFrame`."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MalformedFrame(str(error)) from error


def open_body(kind: str, body: Body) -> Any:
    """Return the message of `kind` in the packed body of an envelope; kind "" is no message, `None`.

    Raises `UnknownKind`, or `MalformedMessage` with the field's name.
    """
    if not kind:
        return None
    cls = REGISTRY.get(kind)
    if cls is None:
        raise UnknownKind(f"unknown kind {kind!r}")
    try:
        return _reader(cls)(body)
    except _MISFITS as error:
        raise MalformedMessage(f"{kind}: {_explain(error)}") from error


def open_text(body: Body) -> str:
    """Return a packed body that is text: the reason of a refusal. Raises `MalformedMessage`."""
    try:
        return _TEXT.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"a reason that is no text: {error}") from error


def structure(plain: Mapping[str, Any], cls: type) -> Any:
    """Structure plain data as `cls`. Raises `ValueError` that names the unknown, missing or wrong field."""
    try:
        return _hook(cls)(plain, cls)
    except _MISFITS as error:
        raise ValueError(_explain(error)) from error


_MISFITS = (
    ForbiddenExtraKeysError,
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    msgspec.MsgspecError,
)


def _explain(error: Exception) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        names = ", ".join(sorted(repr(name) for name in error.extra_fields))
        return f"unknown field {names} in {error.cl.__name__}"
    return f"missing field {error}" if isinstance(error, KeyError) else str(error)


@cache
def _hook(cls: type) -> Callable[[Any, Any], Any]:
    return CONVERTER.get_structure_hook(cls)


@cache
def _reader(cls: type) -> Callable[[Body], Any]:
    """Return what makes a message of the class from a packed body. It raises one of `_MISFITS`."""
    hook = _hook(cls)

    def read_plainly(body: Body) -> Any:
        return hook(_PLAIN.decode(body), cls)

    fields = attrs.fields(cls)
    if not _is_flat(cls) or any(field.default is not attrs.NOTHING for field in fields) or len(fields) > 15:
        return read_plainly
    decode: Callable[[Body], Any] = msgspec.msgpack.Decoder(cls).decode
    head = 0x80 | len(fields)

    def read(body: Body) -> Any:
        # msgspec skips fields it does not know. With as many as are wanted, and none of those missing, no
        # other is there. Where a field has a default, it could be.
        return decode(body) if memoryview(body)[0] == head else read_plainly(body)

    return read
