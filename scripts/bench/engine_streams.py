"""Streams of tokens with the time each one came: ours from the engine in process, the peer's over its HTTP server."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from gpu.engine import Engine
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request, StepStats

THREADS = 2
PEER_VARIABLE = "ANTIPHON_LLAMA_SERVER"
MODEL_VARIABLE = "ANTIPHON_MODEL"
NO_PEER = f"no llama-server: build llama.cpp with -DGGML_NATIVE=ON and name its binary in {PEER_VARIABLE}"
_START_LIMIT = 60.0


@define
class Stream:
    """One reply: when it was asked for, and when each token came. Seconds of `time.perf_counter`."""

    asked: float
    times: list[float] = field(factory=list)
    cached: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens that came from `start` to `end`."""
        inside = [at for at in self.times if start <= at <= end]
        return [later - earlier for earlier, later in itertools.pairwise(inside)]


def together(streams: Sequence[Stream]) -> float:
    """Tokens per second of all streams while all of them run: from the last first token to the first last one."""
    start, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    if end <= start:
        raise RuntimeError("the first stream ended before the last began: ask for longer replies")
    return sum(start < at <= end for s in streams for at in s.times) / (end - start)


def model_path() -> Path:
    """The default model, or the one `ANTIPHON_MODEL` names."""
    named = os.environ.get(MODEL_VARIABLE)
    default = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(named) if named else default


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Random ordinary tokens: two prompts share no prefix unless their seeds are the same."""
    rng = random.Random(seed)  # noqa: S311 - no secret depends on it
    return tuple(rng.randrange(1000, 40_000) for _ in range(length))


class Ours:
    """The engine, stepped by the caller."""

    def __init__(self, max_batch: int = 32) -> None:
        self.engine = Engine.load(model_path(), kv_bytes=1 << 30, max_batch=max_batch, threads=THREADS)
        self.streams: dict[str, Stream] = {}
        self.stats: list[StepStats] = []

    def ask(self, tokens: Sequence[int], count: int, owner: str = "bench") -> Stream:
        """Queue a greedy reply of exactly `count` tokens."""
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        name = str(len(self.streams))
        self.streams[name] = stream = Stream(time.perf_counter())
        self.engine.add(Request(name, tuple(tokens), params, owner=owner))
        return stream

    def step(self) -> None:
        """One step; what came out is noted."""
        output = self.engine.step()
        now = time.perf_counter()
        self.stats.append(output.stats)
        for out in output.outputs:
            self.streams[out.id].times += [now] * len(out.tokens)
            self.streams[out.id].cached = out.cached_tokens

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            self.step()

    def forget(self) -> None:
        """Drop the prefix cache, so that the next round pays what the first one paid."""
        self.engine.pool.clear_cache()

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()


class Peer:
    """llama.cpp's server on a loopback port, its best settings for this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, tokens: Sequence[int], count: int) -> tuple[Stream, threading.Thread]:
        """Start a greedy reply of exactly `count` tokens; join the thread for its end."""
        stream = Stream(time.perf_counter())
        reader = threading.Thread(target=self._read, args=(stream, list(tokens), count))
        reader.start()
        return stream, reader

    def _read(self, stream: Stream, tokens: list[int], count: int) -> None:
        body = {
            "prompt": tokens, "n_predict": count, "stream": True, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            # The last event repeats nothing and carries no token.
            if line.startswith(b"data: ") and b'"stop":false' in line:
                stream.times.append(time.perf_counter())
        connection.close()


@contextmanager
def peer(slots: int, context: int) -> Iterator[Peer | None]:
    """The peer with room for `slots` streams of `context` tokens; None where there is no binary."""
    binary = os.environ.get(PEER_VARIABLE) or shutil.which("llama-server")
    if binary is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        binary, "-m", str(model_path()), "--host", "127.0.0.1", "--port", str(port), "-t", str(THREADS),
        "-tb", str(THREADS), "-np", str(slots), "-c", str(slots * context), "-cram", "0", "--no-webui",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        yield Peer(port)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_LIMIT
    while time.monotonic() < until and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(
        f"llama-server did not get ready in {_START_LIMIT:.0f} s (exit status {server.poll()})"
    )
