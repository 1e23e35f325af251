"""What a person can get wrong: one clear line, exit code 2, no traceback, nothing left running."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def antiphon(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("antiphon: ")
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in lines[0]


def test_a_wrong_flag():
    refused(antiphon("serve", "--prot", "8000"), "--prot", "--help")


def test_a_wrong_command():
    refused(antiphon("sreve"), "sreve")


def test_a_port_that_is_no_number():
    refused(antiphon("serve", "--port", "http"), "http")


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--threads", "100000", "cores"),
        ("--max-batch", "1000000", "max_batch is 1000000"),
        ("--max-batch", "300", "255"),
        ("--edges", "100000", "256"),
        ("--drain", "nan", "drain is nan"),
        ("--kv-mib", "1", "23 or more"),
    ],
)
def test_a_value_nothing_can_run_with(tmp_path, model_file, flag, value, word):
    state = tmp_path / "var"
    model = ("--model", str(model_file), "--engine", "host")
    refused(antiphon("serve", "--state", str(state), "--port", "0", *model, flag, value), word)
    assert not (state / "run").exists()


@pytest.mark.parametrize(
    ("policy", "word"), [(None, "cannot read"), ("rules = [", "not TOML"), ("rule = 7", "policy")]
)
def test_a_policy_that_cannot_be_used(tmp_path, policy, word):
    file = tmp_path / "policy.toml"
    if policy is not None:
        file.write_text(policy)
    state = tmp_path / "var"
    refused(antiphon("serve", "--state", str(state), "--port", "0", "--policy", str(file)), word, str(file))
    assert not (state / "run").exists()


def test_a_state_path_too_long_for_its_sockets(tmp_path):
    state = tmp_path / ("x" * (84 - len(os.fsencode(tmp_path)) - 1))
    assert len(os.fsencode(state)) == 84
    refused(antiphon("serve", "--state", str(state), "--port", "0"), "84 bytes", "83", "--state")
    assert not state.exists()


DAMAGED = b"no database, whatever its name says\n" * 100


def test_damaged_accounts(tmp_path, model_file):
    file = tmp_path / "accounts.sqlite"
    file.write_bytes(DAMAGED)
    words = (str(file), "not a database", "restore it", "loses every key")
    refused(antiphon("serve", "--state", str(tmp_path), "--port", "0"), *words)
    refused(antiphon("keys", "list", "--state", str(tmp_path)), *words)
    assert file.read_bytes() == DAMAGED
    assert not (tmp_path / "run").exists()


def test_damaged_books(tmp_path):
    file = tmp_path / "books.sqlite"
    file.write_bytes(DAMAGED)
    words = (str(file), "not a database", "restore it", "loses the record of every charge")
    refused(antiphon("serve", "--state", str(tmp_path), "--port", "0"), *words)
    refused(antiphon("ledger", "balance", "--state", str(tmp_path)), *words)
    assert file.read_bytes() == DAMAGED
    assert not (tmp_path / "run").exists()


def test_credentials_that_cannot_be_read(tmp_path, model_file):
    file = tmp_path / "credentials"
    file.write_bytes(b"\xff\xfe")
    done = antiphon("serve", "--state", str(tmp_path), "--port", "0")
    refused(done, str(file), "not UTF-8", "move it away")
    assert "antiphon serve" not in done.stderr


def test_a_name_where_all_models_are_listed():
    refused(antiphon("model", "list", "foo"), "antiphon model show foo")


def test_a_busy_port(tmp_path, model_file):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        refused(antiphon("serve", "--state", str(tmp_path), "--port", port), port, "--port")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.ipc"))


def test_a_model_file_that_is_not_there(tmp_path):
    refused(antiphon("serve", "--state", str(tmp_path), "--model", "nothing.gguf"), "nothing.gguf")


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"GGUF" + bytes(64), b"not a model at all" * 100],
    ids=["empty", "magic", "zeros", "text"],
)
def test_a_corrupt_model_file(tmp_path, content):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    refused(
        antiphon("serve", "--state", str(tmp_path / "var"), "--port", "0", "--model", str(broken)),
        "broken.gguf",
    )
    refused(antiphon("model", "show", str(broken)), "broken.gguf")


def test_a_truncated_model_file(tmp_path, model_file):
    broken = tmp_path / "cut.gguf"
    with model_file.open("rb") as source:
        broken.write_bytes(source.read(30_000_000))
    refused(
        antiphon("serve", "--state", str(tmp_path / "var"), "--port", "0", "--model", str(broken)), "cut.gguf"
    )
    refused(antiphon("model", "show", str(broken)), "cut.gguf", "cut short")


def test_a_state_directory_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.touch()
    refused(antiphon("serve", "--state", str(file / "var")), "--state")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_state_directory(tmp_path):
    tmp_path.chmod(0o500)
    refused(antiphon("serve", "--state", str(tmp_path / "var")), "--state")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU here")
def test_cuda_without_a_gpu(tmp_path):
    refused(
        antiphon("serve", "--state", str(tmp_path / "var"), "--engine", "cuda"), "no GPU", "--engine host"
    )


def test_an_unknown_setting(tmp_path):
    refused(antiphon("serve", "--state", str(tmp_path), ANTIPHON_PROT="8000"), "ANTIPHON_PROT", "prot")


def test_a_second_serve_on_the_same_state(served):
    refused(antiphon("serve", "--state", str(served.state), "--port", "0"), str(served.state), "--state")
    assert all(a.state == "up" for a in served.actors().values())


def test_ps_where_nothing_runs(tmp_path):
    refused(antiphon("ps", "--state", str(tmp_path)), "antiphon serve")


def test_chat_where_nothing_runs(tmp_path):
    refused(antiphon("chat", "--state", str(tmp_path), "hello"), "antiphon serve")
