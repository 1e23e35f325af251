"""How a turn ends badly, as an exception that carries what the client is told."""

from __future__ import annotations

from actors.protocol import ErrorBody

SERVER_ERROR = "server_error"
OVERLOADED = "service_unavailable_error"
INVALID = "invalid_request_error"
RETRY_AFTER = 1
"""Seconds after which a client that was told of an overload may try again."""


class TurnError(Exception):
    """The turn cannot go on, for this reason; raised anywhere in it, told to the client once."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message)
        self.error = error


def overloaded(what: str) -> ErrorBody:
    """Something is down or overloaded (503): asking again later may help."""
    headers = (("retry-after", str(RETRY_AFTER)),)
    return ErrorBody(503, OVERLOADED, what, code="server_is_overloaded", headers=headers)


def unavailable(what: str) -> TurnError:
    """The turn needs something that is down or overloaded (503)."""
    return TurnError(overloaded(what))


def internal(what: str, code: str = "") -> TurnError:
    """Our fault (500)."""
    return TurnError(ErrorBody(500, SERVER_ERROR, what, code=code))


def invalid(what: str, param: str = "", code: str = "") -> TurnError:
    """The request cannot be served as it is (400)."""
    return TurnError(ErrorBody(400, INVALID, what, param, code, (("x-should-retry", "false"),)))


def not_found(request_id: str) -> ErrorBody:
    """No such turn, or it is another's: the text is the same, so that nobody can tell which."""
    return ErrorBody(404, INVALID, f"No turn with id '{request_id}' was found.", code="not_found")


def first_error(error: BaseException) -> BaseException:
    """Return the error to act on in a group: a `TurnError` if there is one, else the first leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, TurnError)), leaves[0])
