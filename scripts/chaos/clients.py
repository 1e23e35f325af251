"""The clients: server-sent events by hand, the websocket, and the real SDK, each coming back until it has its reply."""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator

import httpx
import openai
from attrs import define, frozen
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from scripts.chaos.record import Evidence

PATIENCE = 90.0
"""Seconds a client goes on coming back."""
RETRY_PAUSE = 0.1


class Lost(Exception):
    """The connection broke, or the server asked to come back."""


class Left(Exception):
    """The client breaks its own connection now, as planned."""


@frozen
class Door:
    """Where to ask, and as whom."""

    root: str
    keys: tuple[str, ...]

    def headers(self, owner: int) -> dict[str, str]:
        """Return the headers of one owner."""
        return {"Authorization": f"Bearer {self.keys[owner]}"}


@define
class Behaviour:
    """What this client will do to its own connection: break it after so many characters, once; and then never return."""

    leave_after: int | None = None
    for_good: bool = False

    def saw(self, text: str) -> None:
        """Break the connection when it is time."""
        if self.leave_after is not None and len(text) >= self.leave_after:
            self.leave_after = None
            raise Left


def run(door: Door, evidence: Evidence, behaviour: Behaviour, rng: random.Random) -> None:
    """Live one turn to its end and fill in the evidence. Never raises for what a server may do."""
    key = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    attempt = ATTEMPTS[evidence.client]
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        try:
            attempt(door, evidence, behaviour, key)
            evidence.outcome = evidence.outcome or "done"
            break
        except Left:
            if behaviour.for_good:
                evidence.outcome = "abandoned"
                break
        except Lost as lost:
            evidence.detail = str(lost)
            time.sleep(RETRY_PAUSE)
        except _Final as final:
            evidence.outcome, evidence.detail = "error", str(final)
            break
    evidence.seconds = time.monotonic() - began
    evidence.outcome = evidence.outcome or "never ended"


class _Final(Exception):
    """An error that coming back does not mend."""


def _refusal(status: int, text: str) -> Exception:
    return Lost(f"{status}: {text[:200]}") if status in {429, 502, 503} else _Final(f"{status}: {text[:300]}")


@contextlib.contextmanager
def _transport() -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, WebSocketException, OSError, openai.APIConnectionError) as error:
        raise Lost(f"{type(error).__name__}: {error}") from error
    except openai.APIStatusError as error:
        raise _refusal(error.status_code, str(error)) from error
    except openai.APIError as error:
        raise _Final(str(error)) from error


def _sse(door: Door, evidence: Evidence, behaviour: Behaviour, key: str) -> None:
    body = {
        **evidence.question.body(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "fast_answers": "off",
    }
    headers = {**door.headers(evidence.owner), "Idempotency-Key": key}
    evidence.attempts.append("")
    with (
        _transport(),
        httpx.stream(
            "POST", f"{door.root}/v1/chat/completions", json=body, headers=headers, timeout=60
        ) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            raise _refusal(answer.status_code, answer.text)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                evidence.ends += 1
                return
            if line.startswith("data: "):
                _take_chunk(json.loads(line.removeprefix("data: ")), evidence, behaviour)
    raise Lost("the stream ended without [DONE]")


def _take_chunk(event: dict[str, object], evidence: Evidence, behaviour: Behaviour) -> None:
    if "error" in event:
        raise _Final(json.dumps(event["error"]))
    usage = event.get("usage")
    if isinstance(usage, dict):
        evidence.completion_tokens, evidence.prompt_tokens = (
            usage["completion_tokens"],
            usage["prompt_tokens"],
        )
    evidence.response_id = str(event.get("id", ""))
    for choice in event.get("choices", []):  # type: ignore[attr-defined]
        evidence.attempts[-1] += choice["delta"].get("content") or ""
    behaviour.saw(evidence.text)


def _sdk(door: Door, evidence: Evidence, behaviour: Behaviour, key: str) -> None:
    client = openai.OpenAI(
        base_url=f"{door.root}/v1", api_key=door.keys[evidence.owner], max_retries=2, timeout=60
    )
    evidence.attempts.append("")
    with _transport(), client:
        stream = client.chat.completions.create(
            **evidence.question.body(),
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[call-overload]
            extra_headers={"Idempotency-Key": key},
            extra_body={"fast_answers": "off"},
        )
        finished = False
        for chunk in stream:
            evidence.response_id = chunk.id
            if chunk.usage:
                evidence.completion_tokens, evidence.prompt_tokens = (
                    chunk.usage.completion_tokens,
                    chunk.usage.prompt_tokens,
                )
            for choice in chunk.choices:
                evidence.attempts[-1] += choice.delta.content or ""
                finished = finished or bool(choice.finish_reason)
            behaviour.saw(evidence.text)
    if not finished:
        raise Lost("the stream ended without a finish reason")
    evidence.ends += 1


def _sdk_whole(door: Door, evidence: Evidence, behaviour: Behaviour, key: str) -> None:
    client = openai.OpenAI(
        base_url=f"{door.root}/v1", api_key=door.keys[evidence.owner], max_retries=2, timeout=60
    )
    with _transport(), client:
        answer = client.chat.completions.create(
            **evidence.question.body(),
            extra_headers={"Idempotency-Key": key},
            extra_body={"fast_answers": "off"},  # type: ignore[call-overload]
        )
    evidence.response_id = answer.id
    evidence.attempts.append(answer.choices[0].message.content or "")
    evidence.completion_tokens, evidence.prompt_tokens = (
        answer.usage.completion_tokens,
        answer.usage.prompt_tokens,
    )
    evidence.ends += 1
    if behaviour.for_good:
        raise Left


def _websocket(door: Door, evidence: Evidence, behaviour: Behaviour, _key: str) -> None:
    """The first connection asks; later ones resume the response by its id and sequence number."""
    if evidence.response_id:
        _resume(door, evidence, behaviour)
        return
    question = evidence.question.body()
    frame = {
        "type": "response.create",
        "model": question["model"],
        "input": question["messages"],
        "fast_answers": "off",
        "max_output_tokens": evidence.question.max_tokens,
        **{k: v for k, v in question.items() if k in {"temperature", "seed"}},
    }
    evidence.attempts.append("")
    url = door.root.replace("http", "ws", 1) + "/v1/responses"
    with (
        _transport(),
        connect(url, additional_headers=door.headers(evidence.owner), open_timeout=30) as socket,
    ):
        socket.send(json.dumps(frame))
        while not _take_event(json.loads(socket.recv(timeout=60)), evidence, behaviour):
            pass


def _resume(door: Door, evidence: Evidence, behaviour: Behaviour) -> None:
    evidence.attempts.append("")
    url = f"{door.root}/v1/responses/{evidence.response_id}?stream=true"
    with _transport(), httpx.stream("GET", url, headers=door.headers(evidence.owner), timeout=60) as answer:
        if answer.status_code != 200:
            answer.read()
            raise _refusal(answer.status_code, answer.text)
        for line in answer.iter_lines():
            if line.startswith("data: ") and _take_event(
                json.loads(line.removeprefix("data: ")), evidence, behaviour
            ):
                return
    raise Lost("the stream ended without its last event")


def _take_event(event: dict[str, object], evidence: Evidence, behaviour: Behaviour) -> bool:
    """Take one event of a response; True when it was the last."""
    kind = str(event.get("type"))
    response = event.get("response")
    if isinstance(response, dict):
        evidence.response_id = str(response["id"])
    if kind in {"response.completed", "response.incomplete"} and isinstance(response, dict):
        usage = response["usage"]
        evidence.completion_tokens, evidence.prompt_tokens = usage["output_tokens"], usage["input_tokens"]
        evidence.ends += 1
        return True
    if kind in {"response.failed", "error"}:
        error = event.get("error") or (response or {}).get("error")  # type: ignore[attr-defined]
        status = int(event.get("status") or 500)  # type: ignore[call-overload]
        raise _refusal(status, json.dumps(error)) if kind == "error" else _Final(json.dumps(error))
    if kind == "response.output_text.delta":
        evidence.attempts[-1] += str(event["delta"])
        behaviour.saw(evidence.text)
    return False


ATTEMPTS: dict[str, Callable[[Door, Evidence, Behaviour, str], None]] = {
    "sse": _sse,
    "websocket": _websocket,
    "sdk": _sdk,
    "sdk_whole": _sdk_whole,
}
