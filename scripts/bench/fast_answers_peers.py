"""What fast_answer is compared with: the same lookups by way of Redis, and of a gRPC service, both in Python.

Both do what our replica does and no more: the normal form of the text, the lookup, the decision's score.
With Redis the client does it, for Redis holds only keys and values, and answers as they are: that is what it
reads fastest. With gRPC the service does, on our own catalog.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from store.decision import inputs_of
from store.feedback import SECONDS_A_DAY
from store.normalise import key_of
from store.release import OpenRelease, open_release, read_pointer

METHOD = "/antiphon.FastAnswer/Lookup"


def redis_is_here() -> str:
    """Return "" when Redis can be compared with, else what is missing."""
    if shutil.which("redis-server") is None:
        return "not run: no redis-server (apt-get install redis-server)"
    if importlib.util.find_spec("hiredis") is None:
        return "not run: no redis client that is fast (pip install 'redis[hiredis]')"
    return ""


def grpc_is_here() -> str:
    """Return "" when gRPC can be compared with, else what is missing."""
    return "" if importlib.util.find_spec("grpc") else "not run: no gRPC (pip install grpcio)"


def redis_command(directory: Path) -> list[str]:
    """Return the command of a Redis server on a Unix socket, in memory only."""
    socket = str(directory / "redis.sock")
    return ["redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]


def fill_redis(directory: Path, release: OpenRelease) -> None:
    """Put every entry of a catalog into Redis. Waits for the server to be up."""
    import redis  # noqa: PLC0415  optional

    client = redis.Redis(unix_socket_path=str(directory / "redis.sock"))
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    pipeline = client.pipeline(transaction=False)
    for number, (key, entry) in enumerate(release.catalog.items()):
        pipeline.set(key, msgspec.msgpack.encode([entry.name, entry.features, entry.answer]))
        if number % 500 == 499:
            pipeline.execute()
    pipeline.execute()


def redis_rate(directory: Path, release: OpenRelease, texts: list[str], batch: int, in_flight: int) -> float:
    """Look everything up in pipelines of `batch`, `in_flight` of them at once. Returns lookups a second."""
    import redis  # noqa: PLC0415  optional

    decode = msgspec.msgpack.Decoder(tuple[str, tuple[float, ...], str]).decode
    own = threading.local()

    def look_up(part: list[str]) -> list[float]:
        if not hasattr(own, "client"):
            own.client = redis.Redis(unix_socket_path=str(directory / "redis.sock"))
        keyed = [(text, key) for text in part if (key := key_of(text))]
        pipeline = own.client.pipeline(transaction=False)
        for _, key in keyed:
            pipeline.get(key)
        today, values = int(time.time() // SECONDS_A_DAY), pipeline.execute()
        found = [(*pair, *decode(value)) for pair, value in zip(keyed, values, strict=True) if value]
        return release.scorer.score(
            [inputs_of(features, text, key, today) for text, key, _, features, _ in found]
        )

    return _rate(look_up, texts, batch, in_flight)


def grpc_rate(directory: Path, texts: list[str], batch: int, in_flight: int) -> float:
    """Look everything up by calls of `batch` texts, `in_flight` at once. Returns lookups a second."""
    import grpc  # noqa: PLC0415  optional

    with grpc.insecure_channel(f"unix://{directory}/grpc.sock") as channel:
        call = channel.unary_unary(METHOD, msgspec.msgpack.encode, msgspec.msgpack.decode)
        call([texts[0]], wait_for_ready=True, timeout=20)
        futures: list[Any] = []
        begun = time.perf_counter()
        for start in range(0, len(texts), batch):
            futures.append(call.future(texts[start : start + batch]))
            if len(futures) >= in_flight:
                futures.pop(0).result()
        for future in futures:
            future.result()
        return len(texts) / (time.perf_counter() - begun)


def _rate(look_up: Callable[[list[str]], list[float]], texts: list[str], batch: int, in_flight: int) -> float:
    parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(look_up, parts[:in_flight]))
        begun = time.perf_counter()
        list(pool.map(look_up, parts))
        return len(texts) / (time.perf_counter() - begun)


def serve_grpc(directory: Path, root: Path) -> None:
    """Serve a release's lookups over gRPC until stdin closes."""
    import grpc  # noqa: PLC0415  optional

    pointer = read_pointer(root)
    if pointer is None:
        raise SystemExit(f"no release is active in {root}")
    release, lock = open_release(root, pointer.active), threading.Lock()

    def look_up(texts: list[str], _: Any) -> list[tuple[str, str, float]]:
        today = int(time.time() // SECONDS_A_DAY)
        with lock:
            keyed = [
                (text, key, key and release.catalog.find(key)) for text in texts for key in (key_of(text),)
            ]
            found = [(text, key, entry) for text, key, entry in keyed if key and entry]
            scores = release.scorer.score(
                [inputs_of(entry.features, text, key, today) for text, key, entry in found]
            )
            answers = {
                key: (entry.name, entry.answer, s) for (_, key, entry), s in zip(found, scores, strict=True)
            }
            return [answers.get(key or b"", ("", "", 0.0)) for _, key, _ in keyed]

    handler = grpc.unary_unary_rpc_method_handler(look_up, msgspec.msgpack.decode, msgspec.msgpack.encode)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("antiphon.FastAnswer", {"Lookup": handler}),)
    )
    server.add_insecure_port(f"unix://{directory}/grpc.sock")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(0)


if __name__ == "__main__":
    serve_grpc(Path(sys.argv[1]), Path(sys.argv[2]))
