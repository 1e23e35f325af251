"""The real tree, as a user starts it: real processes, the real model, a loopback port."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from scripts import credentials
from scripts.model import DEFAULT, models_directory
from supervision.status import ActorStatus, NotRunning, read_status

QUESTION = "What is the capital of France?"
GOLDEN = "The capital of France is Paris."
PATIENCE = 90.0


class Served:
    """A running `antiphon serve`."""

    def __init__(self, state: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.state = state
        self.command = [
            sys.executable,
            "-m",
            "scripts.cli",
            "serve",
            "--state",
            str(state),
            "--port",
            "0",
            *flags,
        ]
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str]

    def start(self) -> "Served":
        self.log = (self.state.parent / f"{self.state.name}.log").open("a+")
        self.process = subprocess.Popen(
            self.command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=self.env,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.wait(self._is_ready, "the tree is ready")
        return self

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.output()}")
        return "Antiphon serves" in self.output() and self.get("/health/ready").status_code == 200

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def wait(self, condition: Callable[[], bool], what: str) -> float:
        """Poll until it holds; return how long it took. The limit only ends a test that hangs."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            try:
                if condition():
                    return time.monotonic() - began
            except (httpx.HTTPError, openai.OpenAIError, NotRunning, OSError):
                pass
            time.sleep(0.02)
        raise AssertionError(f"waited {PATIENCE:.0f} s for: {what}\n{self.output()[-4000:]}")

    @property
    def credentials(self) -> credentials.Credentials:
        return credentials.read(self.state)

    @property
    def root(self) -> str:
        return self.credentials.base_url.removesuffix("/v1")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.root + path, headers=self.headers, timeout=10)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.credentials.api_key}"}

    def client(self, **options) -> openai.OpenAI:
        found = self.credentials
        return openai.OpenAI(
            base_url=found.base_url, api_key=found.api_key, **{"max_retries": 0, "timeout": 120, **options}
        )

    def ask(self, question: str = QUESTION, **options) -> str:
        answer = self.client().chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            **{"temperature": 0, "extra_body": {"fast_answers": "off"}, **options},
        )
        return answer.choices[0].message.content

    def actors(self) -> dict[str, ActorStatus]:
        return {a.name: a for a in read_status(self.state)}

    def stop(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.log.close()


@pytest.fixture(scope="session")
def model_file() -> Path:
    path = models_directory() / DEFAULT.file_name
    if not path.exists():
        pytest.skip("the default model is not here: antiphon model fetch")
    return path


@pytest.fixture(scope="session")
def served(model_file, tmp_path_factory) -> Iterator[Served]:
    """One tree with the real model for every test that does not break it for good."""
    running = Served(tmp_path_factory.mktemp("antiphon") / "var").start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def own_tree(tmp_path) -> Iterator[Callable[..., Served]]:
    """Start a tree of the test's own, with flags; it is stopped in order afterwards."""
    running: list[Served] = []

    def start(*flags: str) -> Served:
        running.append(Served(tmp_path / "var", *flags).start())
        return running[-1]

    yield start
    for served in running:
        assert served.stop() == 0


@pytest.fixture
def good(served) -> Iterator[None]:
    """After the test, a good request must still give the golden text."""
    yield
    assert served.ask() == GOLDEN
