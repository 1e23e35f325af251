"""`antiphon restart` under load: every edge is a new process, and no connection was refused or dropped."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Self

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

CALLERS = 6


class Load:
    """Callers that open one connection after another until they are told to stop; a few of them stream chats."""

    def __init__(self, served) -> None:
        self.served = served
        self.outcomes: Counter[str] = Counter()
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._call, args=(self._chat if n < 2 else self._look,))
            for n in range(CALLERS)
        ]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _call(self, one) -> None:
        while not self.stop.is_set():
            try:
                outcome = one()
            except httpx.HTTPError as error:
                outcome = f"{type(error).__name__}: {error}"
            self.outcomes[outcome] += 1

    def _look(self) -> str:
        answer = httpx.get(f"{self.served.root}/health/live", timeout=60, verify=False)  # noqa: S501
        return "answered" if answer.status_code == 200 else f"status {answer.status_code}"

    def _chat(self) -> str:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "stream": True,
            "fast_answers": "off",
        }
        url = f"{self.served.root}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=self.served.headers, timeout=60, verify=False)  # noqa: S501
        is_whole = answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text
        return "streamed" if is_whole else f"status {answer.status_code}: {answer.text[-200:]}"


@pytest.mark.parametrize("edges", [1, 2])
def test_a_rolling_restart_refuses_nobody(model_file, own_tree, edges):
    served = own_tree("--edges", str(edges))
    before = {name: actor.pid for name, actor in served.actors().items()}
    command = [sys.executable, "-m", "scripts.cli", "restart", "--state", str(served.state), "--json"]
    with Load(served) as load:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
        )
    names = {f"edge.{n}" for n in range(edges)}
    assert set(json.loads(done.stdout)["restarted"]) == names
    after = {name: actor.pid for name, actor in served.actors().items()}
    assert {name for name in before if after[name] != before[name]} == names
    assert set(load.outcomes) == {"answered", "streamed"}, load.outcomes
