"""`antiphon serve`: check what was asked, then run the tree until it is told to stop."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio
from rich.console import Console

from actors import safety_policy
from gpu.errors import ModelError
from gpu.model_card import read_model_card
from gpu.model_config import ModelConfig
from scripts import config as settings
from scripts import credentials, state_files
from scripts.cli import discard_output
from scripts.config import Config
from scripts.credentials import Credentials
from scripts.engines import ROOT, Chosen, choose, fit
from scripts.failure import UsageFault
from scripts.first_release import activate_example
from scripts.model import KNOWN, resolve
from scripts.sizes import check_sizes
from scripts.tree import SALT, ServedModel, kept_salt, longest_state_path, tree
from store.accounts import Accounts
from store.feedback import ROWS, closed_days
from supervision.errors import SupervisionError
from supervision.spec import SupervisorSpec
from supervision.status import ActorStatus, read_status
from supervision.supervisor import StateInUse, StateUnusable, supervise

QUESTION = "What is the capital of France?"
FIRST_KEY = "first key"
SEAL_EVERY = 3600.0
"""Seconds between looks for days of feedback that are over."""
QUIET = 3.0
"""Seconds a start may take without a word."""
SAY_EVERY = 5.0
"""Seconds between two words on a start that takes long, as loading a large model does."""
BACKLOG = 4096
TCP_USER_TIMEOUT_MS = 30_000
"""A peer that acknowledges nothing for this long is gone; accepted connections inherit it."""

FLAGS = (
    ("--state", str, "directory for everything that lasts (default ./var)"),
    ("--host", str, "address to listen on (default 127.0.0.1)"),
    ("--port", int, "port to listen on; 0 takes any free one (default 8000)"),
    ("--model", str, "a GGUF file, a safetensors directory, or a known name"),
    ("--engine", str, "auto (GPUs where there are any), host (the processor), cuda or scripted"),
    ("--threads", int, "threads of the engine on a processor; 0 follows the cores"),
    ("--kv-mib", int, "memory for KV blocks in MiB; 0 sizes it from what is free"),
    ("--max-batch", int, "sequences in one step at most; 0 is what suits the engine"),
    ("--edges", int, "edge processes"),
    ("--sessions", int, "session host processes"),
    ("--safety-replicas", int, "safety processes"),
    ("--fast-answer-replicas", int, "fast answer processes"),
    (
        "--fast-answer-explore",
        float,
        "share of owners whose fast answers a coin decides, to learn from (default 0)",
    ),
    (
        "--fast-answer-pace",
        float,
        "characters a second of a fast answer that is streamed; 0 gives it at once (default 0)",
    ),
    ("--policy", str, "a safety policy file"),
    ("--disconnect-grace", float, "seconds a turn goes on after its reader left"),
    ("--drain", float, "seconds that streams get to end after SIGTERM"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon serve`."""
    parser = subparsers.add_parser("serve", help="run the whole tree")
    for flag, kind, text in FLAGS:
        parser.add_argument(flag, type=kind, default=None, help=text)
    parser.add_argument(
        "--set-up-only", action="store_true", help="fetch and check what is needed, then stop"
    )
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the tree's exit code."""
    flags = {flag.removeprefix("--").replace("-", "_"): None for flag, _kind, _text in FLAGS}
    config = settings.load({name: getattr(args, name) for name in flags})
    console = Console(stderr=True)
    state = _state_directory(config)
    _check_policy(config)
    state_files.check(state)
    chosen = choose(config.engine)
    model, shape = _model(config, console)
    chosen = fit(chosen, config.engine, shape)
    limited = check_sizes(config, chosen, shape)
    if args.set_up_only:
        return 0
    listener = _listen(config)
    found, first = _credentials(state, listener)
    for line in (limited, activate_example(state)):
        if line:
            print(f"antiphon: {line}", file=sys.stderr)
    spec = tree(config, model, listener.fileno(), chosen.cards, _salt(config, state))
    greet = partial(_greet, found, state, model, chosen, first=first)
    try:
        return trio.run(_supervise, spec, state, greet)
    except (StateInUse, StateUnusable) as error:
        raise UsageFault(f"{error}; stop what runs there, or give --state another directory") from error


async def _supervise(spec: SupervisorSpec, state: Path, greet: Callable[[], None]) -> int:
    starting = trio.CancelScope()

    def on_ready() -> None:
        starting.cancel()
        try:
            greet()
        except BrokenPipeError:
            discard_output()  # nobody reads the greeting: that is no reason not to serve
        trio.lowlevel.spawn_system_task(keep_sealing, state)  # ends with the tree

    trio.lowlevel.spawn_system_task(_within, starting, partial(say_who_starts, state))
    return await supervise(spec, state, on_ready=on_ready)


async def _within(scope: trio.CancelScope, task: Callable[[], Awaitable[None]]) -> None:
    with scope:
        await task()


async def say_who_starts(state: Path) -> None:
    """Say on stderr every few seconds who is still starting, and where their logs are, until cancelled."""
    began = trio.current_time()
    await trio.sleep(QUIET)
    while True:
        try:
            actors = await trio.to_thread.run_sync(read_status, state, abandon_on_cancel=True)
            if line := _still_starting(actors, state, trio.current_time() - began):
                print(line, file=sys.stderr, flush=True)
        except (SupervisionError, OSError):
            pass  # the supervisor does not answer yet, or nobody reads stderr: neither ends a start
        await trio.sleep(SAY_EVERY)


def _still_starting(actors: list[ActorStatus], state: Path, seconds: float) -> str:
    """Name who starts now, or again after it died; those that wait for their turn are not named."""
    awaited = [a for a in actors if a.state == "starting" or (a.state == "down" and a.last_error)]
    if not awaited:
        return ""
    names = ", ".join(f"{a.name} ({a.last_error})" if a.last_error else a.name for a in awaited)
    logs = state / "logs"
    where = f"its log: {logs / awaited[0].name}.log" if len(awaited) == 1 else f"logs: {logs}"
    return f"antiphon: after {seconds:.0f} s still starting: {names}; {where}"


async def keep_sealing(state: Path) -> None:
    """Seal the days of feedback that are over, now and every hour, in a process of its own. Needs `pyarrow`.

    Cancellation: a day that was being sealed is sealed by the next start.
    """
    if importlib.util.find_spec("pyarrow") is None:
        return
    nice = [found] if (found := shutil.which("nice")) else []
    command = [*nice, sys.executable, "-m", "scripts.cli", "catalog", "seal", "--state", str(state)]
    while True:
        try:
            if any(closed_days(state / "feedback", kind, time.time()) for kind in ROWS):
                done = await trio.run_process(
                    command, capture_stdout=True, capture_stderr=True, check=False, cwd=ROOT
                )
                sys.stderr.write(done.stderr.decode(errors="replace"))
        except OSError as error:
            sys.stderr.write(f"antiphon: feedback is not sealed: {error}\n")
        await trio.sleep(SEAL_EVERY)


def _salt(config: Config, state: Path) -> str:
    if not config.fast_answer_explore:
        return ""
    try:
        return kept_salt(state)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(
            f"{state / SALT} cannot be kept: {error}; or set fast_answer_explore to 0"
        ) from error


def _state_directory(config: Config) -> Path:
    state = Path(config.state).expanduser().resolve()
    length, limit = len(os.fsencode(state)), longest_state_path(config)
    if length > limit:
        raise UsageFault(
            f"{state}: a path of {length} bytes, and sockets in it allow {limit}; give --state a shorter one"
        )
    try:
        state.mkdir(parents=True, exist_ok=True)
        probe = state / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageFault(
            f"{state}: cannot write there ({error.strerror}); give --state a directory of your own"
        ) from error
    return state


def _check_policy(config: Config) -> None:
    if not config.policy:
        return
    try:
        safety_policy.load(Path(config.policy))
    except safety_policy.PolicyError as error:
        raise UsageFault(f"{error}; mend it, or serve without --policy") from error


def _model(config: Config, console: Console) -> tuple[ServedModel, ModelConfig]:
    path = resolve(config.model, console)
    try:
        card = read_model_card(path)
    except ModelError as error:
        raise UsageFault(str(error)) from error
    name = config.model if config.model in KNOWN else path.stem
    served = ServedModel(name, path, card.context_length, card.vocab_size, int(path.stat().st_mtime))
    return served, card.config


def _listen(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        advice = (
            "give --port another, or 0 for any free one"
            if error.errno == errno.EADDRINUSE
            else "give another --host or --port"
        )
        raise UsageFault(f"{config.host}:{config.port}: {error.strerror}; {advice}") from error
    listener.listen(BACKLOG)
    os.set_blocking(listener.fileno(), False)
    return listener


def _credentials(state: Path, listener: socket.socket) -> tuple[Credentials, bool]:
    """Return the key and address to greet with, and whether the key was made just now.

    One is made while the installation has none that anybody was shown: a start that was cut short does not
    leave it without. Who has made keys of their own and removed the file gets no other.
    """
    host, port = listener.getsockname()[:2]
    base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    with state_files.opened(state, state_files.ACCOUNTS, Accounts) as accounts:
        kept = credentials.read(state).api_key if credentials.path_of(state).exists() else ""
        if kept and accounts.verify(kept):
            return Credentials(base_url, kept), False
        if any(key.name != FIRST_KEY for key in accounts.list()):
            return Credentials(base_url, ""), False
        return Credentials(base_url, accounts.create_key("default", FIRST_KEY)[1]), True


def _greet(found: Credentials, state: Path, model: ServedModel, chosen: Chosen, *, first: bool) -> None:
    """Say where it serves, there and in the state directory, which is ours by now.

    The key is shown once, by the start that made it; later starts name the file.
    """
    kept = credentials.path_of(state)
    if found.api_key:
        credentials.write(state, found)
    print(f"Antiphon serves {model.name} at {found.base_url}, on {chosen.words}")
    if chosen.note:
        print(chosen.note)
    if first:
        print(f"Your key, shown this once (it is also in {kept}):\n\n{found.lines()}")
        key, source = found.api_key, ""
    else:
        print(f"The key is in {kept}.\n" if found.api_key else "The keys: antiphon keys list\n")
        key, source = "$OPENAI_API_KEY", f". {kept}; "
    body = json.dumps(
        {"model": "default", "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    )
    print(
        f'{source}curl -N {found.base_url}/chat/completions -H "Authorization: Bearer {key}"'
        f""" -H "Content-Type: application/json" -d '{body}'"""
    )
    sys.stdout.flush()
