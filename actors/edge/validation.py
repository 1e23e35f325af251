"""Strict JSON, and reading fields from it by type and range.

Python's parser takes more than JSON allows (`NaN`, duplicate keys, half surrogates); what it lets through
here is JSON as every other parser would read it, so no two components can disagree on what a client said.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

from actors.edge.errors import ApiError, invalid, shown

MAX_DEPTH = 64
"""Deeper than any request of the wire; far below what would exhaust a parser's stack."""
MAX_NUMBER_LENGTH = 64
"""A number with more characters is no one's parameter, and converting it costs quadratic time."""

_ESCAPES_TO_CHECK = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises `ApiError` 400 for anything else: not UTF-8, not JSON, not an object, duplicate keys, NaN or
    Infinity (spelt or by overflow), unpaired surrogates, NUL characters, nesting past `MAX_DEPTH`.
    """
    value = _parse(body)
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {_kind(value)}.")
    return value


def _parse(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    if not text.strip():
        raise invalid("The body is empty: send a JSON object.")
    _check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise invalid(f"The JSON is nested deeper than {MAX_DEPTH} levels.") from None
    except json.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if _ESCAPES_TO_CHECK.search(text):
        _check_strings(value)
    return value


def _check_depth(text: str) -> None:
    """Refuse deep nesting before the parser recurses. Brackets inside strings are skipped."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for mark in _brackets(text):
        depth += 1 if mark in "[{" else -1
        if depth > MAX_DEPTH:
            raise invalid(f"The JSON is nested deeper than {MAX_DEPTH} levels.")


_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""A whole string (possessive, and its end optional: one pass whatever the text) or a bracket."""


def _brackets(text: str) -> Iterator[str]:
    return (m.group() for m in _TOKENS.finditer(text) if m.group()[0] != '"')


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise invalid(f"The key {shown(key)} appears twice in one object.", _param(key))
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise invalid(f"{name} is not a JSON number.")


def _finite(text: str) -> float:
    value = float(text) if len(text) <= MAX_NUMBER_LENGTH else math.inf
    if not math.isfinite(value):
        raise invalid(f"The number {shown(text)} is out of range.")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_LENGTH:
        raise invalid(f"The number {shown(text)} is out of range.")
    return int(text)


def _check_strings(value: Any) -> None:
    for path, text in _strings(value, ""):
        if "\x00" in text:
            raise invalid("A string contains the NUL character.", _param(path))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise invalid("A string contains half of a surrogate pair.", _param(path)) from None


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _strings(item, f"{path}.{key}" if path else key)


def _param(name: str) -> str:
    """Return a field's name fit for a reply: printable ASCII, short."""
    return name if name.isascii() and name.isprintable() and len(name) <= 100 else ""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


class Fields:
    """The fields of one JSON object, taken one by one; what is left over at the end is refused by name.

    A null is an absent field throughout, as the wire's clients mean it. `path` names the object in errors.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._left = dict(values)
        self._path = path

    def name(self, field: str) -> str:
        """Return the field's full name, for `param`."""
        return f"{self._path}.{field}" if self._path else field

    def refuse(self, field: str, message: str) -> ApiError:
        """Return the error that names this field."""
        return invalid(f"{message} (field {self.name(field)!r})", self.name(field))

    def take(self, field: str) -> Any:
        """Take a field's raw value; None when it is absent or null."""
        return self._left.pop(field, None)

    def done(self) -> None:
        """Refuse what nobody took: a parameter is honoured or refused, never ignored."""
        for field in self._left:
            known = _param(self.name(field))
            raise invalid(f"Unrecognized request argument supplied: {shown(field)}.", known)

    def text(self, field: str, limit: int) -> str | None:
        """Take a string of at most `limit` characters."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refuse(field, f"must be a string, not {_kind(value)}")
        if len(value) > limit:
            raise self.refuse(field, f"must have at most {limit} characters, not {len(value)}")
        return value

    def flag(self, field: str) -> bool | None:
        """Take a boolean."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(field, f"must be true or false, not {_kind(value)}")
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """Take a whole number in [low, high]. `1.0` is one, as JSON has a single kind of number."""
        value = self.take(field)
        if value is None:
            return None
        return _as_integer(self, field, value, low, high)

    def number(self, field: str, low: float, high: float) -> float | None:
        """Take a number in [low, high]."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(field, f"must be a number, not {_kind(value)}")
        if not low <= value <= high:
            raise self.refuse(field, f"must be between {low:g} and {high:g}, not {shown(value)}")
        return float(value)

    def choice(self, field: str, allowed: Collection[str]) -> str | None:
        """Take one of a few strings."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(field, f"must be one of {', '.join(sorted(allowed))}, not {shown(value)}")
        return value

    def array(self, field: str, limit: int) -> list[Any] | None:
        """Take an array of at most `limit` items."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(field, f"must be an array, not {_kind(value)}")
        if len(value) > limit:
            raise self.refuse(field, f"must have at most {limit} items, not {len(value)}")
        return value

    def mapping(self, field: str) -> dict[str, Any] | None:
        """Take an object, as it is."""
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, f"must be an object, not {_kind(value)}")
        return value

    def integers(self, field: str, low: int, high: int, limit: int) -> tuple[int, ...]:
        """Take an array of whole numbers in [low, high]; empty when absent."""
        items = self.array(field, limit) or []
        return tuple(
            _as_integer(self, f"{field}[{index}]", item, low, high) for index, item in enumerate(items)
        )

    def unsupported(self, field: str, *neutral: Any) -> None:
        """Refuse a field that is not served, unless its value is absent, null or one of `neutral`."""
        value = self.take(field)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise self.refuse(field, f"{shown(value)} is not supported by this server")


def _as_integer(fields: Fields, field: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise fields.refuse(field, f"must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise fields.refuse(field, f"must be between {low} and {high}, not {shown(value)}")
    return int(value)
