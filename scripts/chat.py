"""`antiphon chat`: a terminal chat that streams. Ctrl-C stops a reply and keeps it; a lost server is waited for."""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx

from scripts import credentials
from scripts.failure import UsageFault

PATIENCE = 60.0
"""Seconds to go on trying to get the rest of a reply after the connection broke."""


class ChatError(Exception):
    """The server answered with an error; the text is its message."""


class Reply:
    """One reply, read over as many connections as it takes.

    Every attempt carries the same idempotency key, so the server replays the turn instead of making a second one;
    what was shown already is skipped by length.
    """

    def __init__(self, client: httpx.Client, body: dict[str, object]) -> None:
        self.client = client
        self.body = body
        self.key = str(uuid.uuid4())
        self.text = ""

    def pieces(self) -> Iterator[str]:
        """Yield new text as it comes. Raises `ChatError`."""
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                yield from self._attempt()
            except httpx.TransportError as error:
                if time.monotonic() > give_up:
                    raise ChatError(
                        f"the server did not come back within {PATIENCE:.0f} s: {error}"
                    ) from error
                time.sleep(0.2)
            else:
                return

    def _attempt(self) -> Iterator[str]:
        seen = 0
        with self.client.stream(
            "POST", "chat/completions", json=self.body, headers={"Idempotency-Key": self.key}
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                raise _retriable_or_final(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    text = _delta(json.loads(line.removeprefix("data: ")))
                    seen += len(text)
                    fresh = (
                        text[max(0, len(text) - (seen - len(self.text))) :] if seen > len(self.text) else ""
                    )
                    self.text += fresh
                    if fresh:
                        yield fresh
        raise httpx.RemoteProtocolError("the stream ended early")


def _retriable_or_final(answer: httpx.Response) -> Exception:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text
    if answer.status_code in {502, 503}:
        return httpx.RemoteProtocolError(message)
    return ChatError(f"{answer.status_code}: {message}")


def _delta(event: dict[str, object]) -> str:
    if isinstance(event.get("error"), dict):
        raise ChatError(str(event["error"]["message"]))  # type: ignore[index]
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    return str(choices[0]["delta"].get("content") or "")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon chat`."""
    parser = subparsers.add_parser("chat", help="talk to the model in this terminal")
    parser.add_argument(
        "--state", default="./var", help="where the server keeps its state (its address and key are there)"
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--fast-answers", choices=("auto", "off"), default="auto")
    parser.add_argument("message", nargs="*", help="ask this one thing and leave")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the chat until the end of input."""
    found = credentials.read(Path(args.state))
    headers = {"Authorization": f"Bearer {found.api_key}"}
    with httpx.Client(
        base_url=found.base_url.rstrip("/") + "/", headers=headers, timeout=httpx.Timeout(120, connect=5)
    ) as client:
        _demand_server(client, args.state)
        history = [{"role": "system", "content": args.system}] if args.system else []
        if args.message:
            return _turn(client, args, history, " ".join(args.message))
        return _converse(client, args, history)


def _demand_server(client: httpx.Client, state: str) -> None:
    try:
        client.get("models").raise_for_status()
    except httpx.HTTPError as error:
        raise UsageFault(
            f"no server answers at {client.base_url} ({error}); start one with: antiphon serve --state {state}"
        ) from error


def _converse(client: httpx.Client, args: argparse.Namespace, history: list[dict[str, str]]) -> int:
    print("Ctrl-C stops a reply and keeps it; Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line:
            _turn(client, args, history, line)


def _turn(client: httpx.Client, args: argparse.Namespace, history: list[dict[str, str]], line: str) -> int:
    history.append({"role": "user", "content": line})
    body: dict[str, object] = {
        "model": args.model,
        "messages": list(history),
        "stream": True,
    }
    optional = {
        "temperature": args.temperature,
        "seed": args.seed,
        "max_completion_tokens": args.max_tokens,
    }
    body.update({key: value for key, value in optional.items() if value is not None})
    if args.fast_answers == "off":
        body["fast_answers"] = "off"
    reply = Reply(client, body)
    code = 0
    try:
        for piece in reply.pieces():
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except ChatError as error:
        print(f"\nantiphon: {error}", file=sys.stderr)
        code = 1
    if reply.text:
        history.append({"role": "assistant", "content": reply.text})
    else:
        history.pop()
    return code
