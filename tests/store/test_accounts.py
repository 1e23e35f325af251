"""Keys: shown once, kept as hashes, refused everywhere as soon as they are revoked."""

import subprocess
import sys
from pathlib import Path

import pytest

from store.accounts import Accounts, Identity, UnknownKey
from store.limits import Limits


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "accounts.sqlite"


@pytest.fixture
def accounts(path):
    opened = Accounts(path, clock=lambda: 1700000000.5)
    yield opened
    opened.close()


def test_a_secret_proves_who_it_was_made_for(accounts):
    limits = Limits(requests_per_minute=3, budget_tokens=100)
    key_id, secret = accounts.create_key("acme", "ci", admin=True, fast_answers=False, limits=limits)
    assert secret.startswith("ak-")
    assert accounts.verify(secret) == Identity("acme", key_id, True, False, False, limits)
    assert accounts.limits_of(key_id) == limits


@pytest.mark.parametrize("secret", ["", "ak-", "ak-wrong", "\ud800", "x" * 100_000])
def test_anything_else_proves_nothing(accounts, secret):
    accounts.create_key("acme", "ci")
    assert accounts.verify(secret) is None


def test_the_secret_is_nowhere_on_disk(accounts, path):
    _, secret = accounts.create_key("acme", "ci")
    assert not [f for f in path.parent.iterdir() if secret.encode() in f.read_bytes()]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_revoked_key_is_refused_at_once_in_other_openers_too(accounts, path):
    key_id, secret = accounts.create_key("acme", "ci", admin=True)
    edge = Accounts(path)
    assert edge.verify(secret) is not None
    accounts.revoke(key_id)
    assert edge.verify(secret) is None
    assert accounts.verify(secret) is None
    edge.close()


def test_another_process_s_revoke_is_seen(accounts, path):
    key_id, secret = accounts.create_key("acme", "ci")
    assert accounts.verify(secret) is not None
    program = f"from store.accounts import Accounts; Accounts({str(path)!r}).revoke({key_id!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2])
    assert accounts.verify(secret) is None


def test_acts_upon_keys_are_audited_once(accounts):
    key_id, _ = accounts.create_key("acme", "ci", by="serve")
    accounts.revoke(key_id)
    accounts.revoke(key_id)
    assert [(r.action, r.key_id, r.by) for r in accounts.audit()] == [
        ("create", key_id, "serve"),
        ("revoke", key_id, "cli"),
    ]


def test_the_list_has_every_key_and_when_it_ended(accounts):
    first, _ = accounts.create_key("acme", "one")
    second, _ = accounts.create_key("beta", "two")
    accounts.revoke(first)
    assert {(k.identity.key_id, k.name, k.created, k.revoked) for k in accounts.list()} == {
        (first, "one", 1700000000, 1700000000),
        (second, "two", 1700000000, None),
    }


def test_revoking_what_is_not_there_says_so(accounts):
    with pytest.raises(UnknownKey, match="key_nope"):
        accounts.revoke("key_nope")
