"""From a bearer key to the identity that every message carries."""

from __future__ import annotations

from werkzeug.datastructures import Headers

from actors.edge.errors import forbidden, unauthorized
from store.accounts import Accounts, Identity

MAX_SECRET = 512
"""No key is longer; a longer one is not even hashed."""


class Identities:
    """Proves who is asking. A revoked key is refused from the next request on."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def prove(self, headers: Headers, *, writes: bool = False, admin: bool = False) -> Identity:
        """Return the identity of a request. Raises 401 without a good key, 403 when it may not do this."""
        values = headers.getlist("authorization")
        if len(values) != 1:
            raise unauthorized(
                "You didn't provide an API key: send the header 'Authorization: Bearer KEY', once."
            )
        scheme, _, secret = values[0].partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise unauthorized("The Authorization header must be 'Bearer KEY'.")
        identity = self._accounts.verify(secret) if len(secret) <= MAX_SECRET else None
        if identity is None:
            raise unauthorized("Incorrect API key provided.")
        if writes and identity.read_only:
            raise forbidden("This key may only read.")
        if admin and not identity.admin:
            raise forbidden("This needs an administrator's key.")
        return identity
