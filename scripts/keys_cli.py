"""`antiphon keys`: make, list and revoke keys."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import asdict
from rich.table import Column, Table

from scripts import state_files, tables
from scripts.failure import UsageFault
from store.accounts import Accounts, Key, UnknownKey
from store.limits import Limits

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "budget_tokens")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon keys create|list|revoke`."""
    parser = subparsers.add_parser("keys", help="make, list and revoke keys")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_create(actions)
    _add(actions, "list", "every key, revoked ones too; nobody has their secrets").set_defaults(
        handler=list_keys
    )
    revoke_parser = _add(actions, "revoke", "refuse a key everywhere, at once")
    revoke_parser.add_argument("key_id", help="as `antiphon keys list` shows it")
    revoke_parser.set_defaults(handler=revoke)


def create(args: argparse.Namespace) -> int:
    """Make a key and print its secret, this once."""
    given = {name: getattr(args, name) for name in _LIMITS}
    limits = Limits(**given) if any(value is not None for value in given.values()) else None
    with _accounts(args, must_exist=False) as accounts:
        key_id, secret = accounts.create_key(
            args.account,
            args.name,
            admin=args.admin,
            fast_answers=args.fast_answers,
            read_only=args.read_only,
            limits=limits,
        )
    if args.json:
        print(json.dumps({"key_id": key_id, "account": args.account, "secret": secret}))
    else:
        print(f"{key_id} for {args.account}. The secret is shown this once and kept nowhere:\n{secret}")
    return 0


def list_keys(args: argparse.Namespace) -> int:
    """Print every key."""
    with _accounts(args) as accounts:
        keys = accounts.list()
    if args.json:
        print(json.dumps({"keys": [_facts(key) for key in keys]}, indent=2))
    else:
        tables.show(_table(keys))
    return 0


def revoke(args: argparse.Namespace) -> int:
    """Refuse a key from now on."""
    with _accounts(args) as accounts:
        try:
            accounts.revoke(args.key_id)
        except UnknownKey as error:
            raise UsageFault(str(error.args[0])) from error
    print(json.dumps({"revoked": args.key_id}) if args.json else f"{args.key_id} is refused from now on")
    return 0


def _add(actions: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about)
    parser.add_argument("--state", default="./var", help="state directory (default ./var)")
    parser.add_argument("--json", action="store_true", help="print facts for a program")
    return parser


def _add_create(actions: Any) -> None:
    parser = _add(actions, "create", "make a key; its secret is shown once")
    parser.add_argument(
        "--account", type=_word, default="default", help="whom it speaks for (default: default)"
    )
    parser.add_argument("--name", type=_word, default="key", help="a label for people")
    parser.add_argument("--admin", action="store_true", help="may also do what operators do")
    parser.add_argument("--read-only", action="store_true", help="may look, not ask")
    parser.add_argument(
        "--no-fast-answers",
        dest="fast_answers",
        action="store_false",
        help="never answer it from the catalog",
    )
    for name in _LIMITS:
        text = f"its own limit of {name.replace('_', ' ')}; without any it shares its account's"
        parser.add_argument(f"--{name.replace('_', '-')}", type=_count, metavar="N", help=text)
    parser.set_defaults(handler=create)


def _word(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text!r}")
    return int(text)


def _accounts(args: argparse.Namespace, *, must_exist: bool = True) -> AbstractContextManager[Accounts]:
    state, file = Path(args.state), state_files.ACCOUNTS
    if must_exist and not (state / file.name).exists():
        raise UsageFault(
            f"no keys in {args.state}: make one with `antiphon keys create --state {args.state}`"
        )
    return state_files.opened(state, file, Accounts)


def _facts(key: Key) -> dict[str, Any]:
    who = key.identity
    return {
        "key_id": who.key_id,
        "account": who.account,
        "name": key.name,
        "admin": who.admin,
        "read_only": who.read_only,
        "fast_answers": who.fast_answers,
        "limits": None if who.limits is None else asdict(who.limits),
        "created": key.created,
        "revoked": key.revoked,
    }


def _table(keys: list[Key]) -> Table:
    key_column = Column("key", no_wrap=True)
    table = tables.table(key_column, "account", "name", "may", "limits", "created", "revoked")
    for key in keys:
        who = key.identity
        may = [word for word, so in (("admin", who.admin), ("read only", who.read_only)) if so]
        limits = {} if who.limits is None else asdict(who.limits)
        tables.add(
            table,
            who.key_id,
            who.account,
            key.name,
            ", ".join(may) or "ask",
            ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None),
            _date(key.created),
            "" if key.revoked is None else _date(key.revoked),
        )
    return table


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
