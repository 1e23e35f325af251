"""Errors as the OpenAI wire has them: four keys, a status, and headers on whether to retry."""

from __future__ import annotations

import json
from collections.abc import Iterable

from actors.protocol import ErrorBody


class ApiError(Exception):
    """A request ends with this error. Raised anywhere in the edge, rendered in one place."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message)
        self.body = body


def error_object(body: ErrorBody) -> dict[str, str | None]:
    """Return the inner object of an error reply; `param` and `code` are strings or null."""
    return {
        "message": body.message,
        "type": body.type,
        "param": body.param or None,
        "code": body.code or None,
    }


def encode(body: ErrorBody) -> bytes:
    """Return the JSON bytes of an error reply. Pure ASCII: whatever a client sent, the reply encodes."""
    return json.dumps({"error": error_object(body)}).encode("ascii")


def shown(value: object, limit: int = 60) -> str:
    """Quote a client's value for an error message: ASCII, and never longer than `limit`."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def invalid(message: str, param: str = "", code: str = "") -> ApiError:
    """400: the request is wrong in itself; asking again changes nothing."""
    return ApiError(ErrorBody(400, "invalid_request_error", message, param, code))


def unauthorized(message: str) -> ApiError:
    """401: no key, or one that is not known (any more)."""
    headers = (("www-authenticate", "Bearer"),)
    return ApiError(ErrorBody(401, "invalid_request_error", message, "", "invalid_api_key", headers))


def forbidden(message: str) -> ApiError:
    """403: the key is good, and may not do this."""
    return ApiError(ErrorBody(403, "permission_error", message))


def model_not_found(name: str) -> ApiError:
    """404 for a model that is not here, or not the asker's."""
    message = f"The model {shown(name)} does not exist or you do not have access to it."
    return ApiError(ErrorBody(404, "invalid_request_error", message, "model", "model_not_found"))


def not_found(message: str) -> ApiError:
    """404 for an id that is unknown, or another owner's: the same text for both."""
    return ApiError(ErrorBody(404, "invalid_request_error", message, "", "not_found"))


def method_not_allowed(message: str, allowed: Iterable[str]) -> ApiError:
    """405: the path is right and the verb is not; `allowed` are those that are."""
    headers = (("allow", ", ".join(sorted(allowed))),)
    return ApiError(ErrorBody(405, "invalid_request_error", message, headers=headers))


def timed_out(message: str) -> ApiError:
    """408: the body did not arrive in time."""
    return ApiError(ErrorBody(408, "invalid_request_error", message))


def too_large(message: str) -> ApiError:
    """413: refused while reading."""
    return ApiError(ErrorBody(413, "invalid_request_error", message))


def internal(message: str = "The server failed while handling this request.") -> ApiError:
    """500: our fault. The message never holds a traceback or anyone's text."""
    return ApiError(ErrorBody(500, "server_error", message))


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """503: overloaded or starting; a retry in `retry_after` seconds may well succeed."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(ErrorBody(503, "service_unavailable_error", message, "", "server_is_overloaded", headers))
