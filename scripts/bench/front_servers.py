"""The two servers that `antiphon bench front` compares, each a process of its own.

`python -m scripts.bench.front_servers tree STATE` runs the real tree with the scripted engine, `… bare` a
bare Quart handler on the stock server. Either prints one line when it is ready: its port, and a key or `-`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import trio
from attrs import evolve
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio

from scripts.config import Config
from scripts.tree import ServedModel, tree
from store.accounts import Accounts
from supervision.spec import ChildSpec, SupervisorSpec
from supervision.supervisor import supervise

MODEL = "scripted"
STEP_SECONDS = 0.01
"""The pace of both: one token, one event."""
PLENTY = 10_000_000


def run_tree(state: Path) -> int:
    """Run the tree until SIGTERM. Its limits are wide: they are not what is measured."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    accounts = Accounts(state / "accounts.sqlite")
    _, key = accounts.create_key("bench", "bench", fast_answers=False)
    accounts.close()
    config = Config(
        state=str(state),
        engine="scripted",
        model=MODEL,
        max_batch=256,
        fast_answer_replicas=0,
        requests_per_minute=PLENTY,
        tokens_per_minute=PLENTY * 100,
        concurrent_requests=1024,
    )
    model = ServedModel(MODEL, Path(MODEL), 8192, 257, 0)
    spec = _paced(tree(config, model, listening.fileno()))
    port = listening.getsockname()[1]

    async def main() -> int:
        return await supervise(spec, state, on_ready=lambda: print(port, key, flush=True))

    return trio.run(main)


def _paced(spec: SupervisorSpec) -> SupervisorSpec:
    """Return the tree with the engine held to the pace."""
    return evolve(spec, children=tuple(_paced_child(child) for child in spec.children))


def _paced_child(child: ChildSpec | SupervisorSpec) -> ChildSpec | SupervisorSpec:
    if isinstance(child, SupervisorSpec):
        return _paced(child)
    if not child.name.startswith("batcher"):
        return child
    return evolve(child, settings={**child.settings, "step_seconds": STEP_SECONDS})


def run_bare() -> None:
    """Run a bare handler that streams as many events as the message has characters, at the same pace."""
    app = QuartTrio(__name__)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        body = json.loads(await request.get_data())
        response = Response(_events(len(body["messages"][-1]["content"])), content_type="text/event-stream")
        response.timeout = None
        return response

    config = HypercornConfig()
    config.errorlog = None
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config.bind = [f"fd://{listening.fileno()}"]
    print(listening.getsockname()[1], "-", flush=True)
    trio.run(serve, app, config)


async def _events(count: int) -> AsyncIterator[bytes]:
    chunk = {
        "id": "chatcmpl-01a22d60-2dd8-7000-87d1-134def521ce9",
        "object": "chat.completion.chunk",
        "created": 1796057607,
        "model": MODEL,
        "system_fingerprint": None,
    }
    for text in ("", *"x" * count):
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        yield b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"
        await trio.sleep(STEP_SECONDS)
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":
    if sys.argv[1] == "tree":
        sys.exit(run_tree(Path(sys.argv[2])))
    run_bare()
