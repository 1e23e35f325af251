"""What `antiphon serve` does around the tree: the settings of fast answers, and days of feedback that are over."""

import argparse
import stat
import subprocess
import sys

import pytest
import trio
import trio.testing

from actors.fast_answer import FastAnswerSettings
from gpu.model_config import ModelConfig
from scripts import cli, serve
from scripts.config import Config, load
from scripts.failure import UsageFault
from scripts.tree import SALT, ServedModel, kept_salt, tree
from supervision.supervisor import leaves

SHAPE = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 64, 256, 1e-5, 1e4, "halves")


async def not_at_all(_spec, _state, *, on_ready):
    on_ready()
    return 0


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve with these words; return the exit code and the tree that would have run."""
    model = ServedModel("small", tmp_path / "small.gguf", 8192, 257, 0)
    monkeypatch.setattr(serve, "_model", lambda *_: (model, SHAPE))
    monkeypatch.chdir(tmp_path)

    def run(*words, supervise=not_at_all):
        trees = []

        async def supervised(spec, state, *, on_ready):
            trees.append(spec)
            return await supervise(spec, state, on_ready=on_ready)

        monkeypatch.setattr(serve, "supervise", supervised)
        parser = argparse.ArgumentParser()
        serve.add_parser(parser.add_subparsers())
        state = ["--state", str(tmp_path / "var"), "--port", "0", "--engine", "scripted"]
        args = parser.parse_args(["serve", *state, *words])
        return args.handler(args), *trees

    return run


def replicas(spec):
    """The settings of the fast answers, as their actors take them."""
    found = [child.settings for child in leaves(spec) if child.name.startswith("fast_answer.")]
    return [FastAnswerSettings(**settings) for settings in found]


def test_every_replica_explores_as_it_is_told_with_one_salt(served, tmp_path):
    _, spec = served("--fast-answer-explore", "0.25", "--fast-answer-replicas", "2")
    first, second = replicas(spec)
    assert (first.explore, len(first.salt)) == (0.25, 32)
    assert second == first
    assert stat.S_IMODE((tmp_path / "var" / SALT).stat().st_mode) == 0o600


def test_the_salt_stays_over_restarts_and_is_another_elsewhere(served, tmp_path):
    before = replicas(served("--fast-answer-explore", "0.25")[1])
    assert replicas(served("--fast-answer-explore", "0.25")[1]) == before
    assert kept_salt(tmp_path) != before[0].salt


def test_of_two_first_starts_at_once_both_have_the_salt_that_is_kept(tmp_path, monkeypatch):
    exists = type(tmp_path).exists

    def not_yet(path):
        monkeypatch.setattr(type(tmp_path), "exists", exists)
        other.append(kept_salt(tmp_path))
        return False

    other = []
    monkeypatch.setattr(type(tmp_path), "exists", not_yet)
    assert [kept_salt(tmp_path)] == other
    assert [path.name for path in tmp_path.iterdir()] == [SALT]


def test_nobody_is_explored_unless_it_is_asked_for(served, tmp_path):
    (replica,) = replicas(served()[1])
    assert (replica.explore, replica.salt) == (0.0, "")
    assert not (tmp_path / "var" / SALT).exists()


def test_a_salt_that_cannot_be_kept_is_one_line_that_says_what_to_do(served, tmp_path):
    (tmp_path / "var" / SALT).mkdir(parents=True)
    with pytest.raises(UsageFault, match="set fast_answer_explore to 0"):
        served("--fast-answer-explore", "0.25")


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan"])
def test_a_share_is_from_0_to_1(tmp_path, share):
    with pytest.raises(UsageFault, match=r"fast_answer_explore is .*: it must be from 0 to 1"):
        load({}, directory=tmp_path, environ={"ANTIPHON_FAST_ANSWER_EXPLORE": share})
    assert (
        load({}, directory=tmp_path, environ={"ANTIPHON_FAST_ANSWER_EXPLORE": "1"}).fast_answer_explore == 1
    )


def test_a_tree_without_a_salt_is_that_of_the_settings(tmp_path):
    model = ServedModel("small", tmp_path / "small.gguf", 8192, 257, 0)
    (replica,) = replicas(tree(Config(state=str(tmp_path)), model, 3))
    assert replica.explore == 0.0


def test_a_damaged_pointer_is_one_line_and_chat_is_served(served, tmp_path, capsys):
    releases = tmp_path / "var" / "releases"
    releases.mkdir(parents=True)
    (releases / "active.json").write_bytes(b'{"act')
    assert served()[0] == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Antiphon serves small")
    (line,) = captured.err.splitlines()
    assert line.startswith(f"antiphon: fast answers are off: {releases}/active.json cannot be read")


def test_a_greeting_nobody_reads_does_not_stop_it(served, monkeypatch):
    def unread(*_, **__):
        raise BrokenPipeError

    discarded = []
    monkeypatch.setattr(serve, "_greet", unread)
    monkeypatch.setattr(serve, "discard_output", lambda: discarded.append(True))
    assert (served()[0], discarded) == (0, [True])


@pytest.fixture
def sealing(monkeypatch):
    """Commands that would be run beside the tree are run in it; returns them, and waits for the first."""
    commands, ran = [], trio.Event()

    async def run_process(command, **_):
        commands.append(command)
        code = cli.main(command[command.index("catalog") :])
        ran.set()
        return subprocess.CompletedProcess(command, code, b"", b"said\n")

    async def until_one_ran(_spec, _state, *, on_ready):
        on_ready()
        with trio.fail_after(10):
            await ran.wait()
        await trio.testing.wait_all_tasks_blocked()
        return 0

    monkeypatch.setattr(trio, "run_process", run_process)
    return commands, until_one_ran


def test_days_of_feedback_that_are_over_are_sealed_beside_the_tree(served, tmp_path, sealing, capsys):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
    from store.feedback import RatingRow, RowLog

    commands, until_one_ran = sealing
    ratings = tmp_path / "var" / "feedback" / "ratings"
    RowLog(ratings.parent, "ratings", "edge.0-1").write([RatingRow(1e9, "r", "acme", "up")])
    assert served(supervise=until_one_ran)[0] == 0
    assert (ratings / "2001-09-09.parquet").exists()
    assert not (ratings / "2001-09-09").exists()
    (command,) = commands
    assert command[-7:-1] == [sys.executable, "-m", "scripts.cli", "catalog", "seal", "--state"]
    assert capsys.readouterr().err.endswith("said\n")
