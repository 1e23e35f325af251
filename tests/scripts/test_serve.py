"""What `antiphon serve` does around the tree: the settings of fast answers, and days of feedback that are over."""

import argparse
import sqlite3
import stat
import subprocess
import sys

import pytest
import trio
import trio.testing

from actors.fast_answer import FastAnswerSettings
from actors.turn_host import SessionSettings
from gpu.model_config import ModelConfig
from scripts import cli, serve
from scripts.config import Config, load
from scripts.failure import UsageFault
from scripts.tree import SALT, ServedModel, kept_salt, longest_state_path, tree
from store.books import Books
from supervision import nng
from supervision.status import ActorStatus, NotRunning
from supervision.supervisor import leaves
from tests.actors.virtual_time import run as on_virtual_time

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


def test_sessions_pace_fast_answers_as_they_are_told(served):
    paces = {}
    for words in ((), ("--fast-answer-pace", "250")):
        _, spec = served(*words)
        (session,) = [child for child in leaves(spec) if child.name.startswith("session.")]
        paces[words] = SessionSettings(**session.settings).fast_answer_pace
    assert list(paces.values()) == [0.0, 250.0]


def test_a_state_path_may_be_as_long_as_the_longest_socket_allows(served, tmp_path):
    longest = longest_state_path(Config())
    for config in (Config(), Config(sessions=3, fast_answer_replicas=101)):
        names = [child.name for child in leaves(tree(config, ServedModel("m", tmp_path, 8192, 257, 0), 3))]
        run = tmp_path.with_name("x" * (longest_state_path(config) - len(str(tmp_path.parent)) - 1)) / "run"
        assert max(len(str(nng.socket_path(run, name))) for name in names) == nng.MAX_PATH
    state = tmp_path / ("x" * longest)
    with pytest.raises(UsageFault, match=f"sockets in it allow {longest}; give --state a shorter one"):
        served("--state", str(state))
    assert not state.exists()


def test_what_limits_requests_is_one_line_at_the_start(served, capsys, monkeypatch):
    monkeypatch.setattr(serve, "check_sizes", lambda *_: "so many tokens")
    assert served()[0] == 0
    assert "antiphon: so many tokens" in capsys.readouterr().err.splitlines()


def test_books_of_other_columns_are_refused_and_sound_ones_left_alone(served, tmp_path):
    file = tmp_path / "var" / "books.sqlite"
    file.parent.mkdir()
    Books(file).close()
    assert served()[0] == 0
    with sqlite3.connect(file) as database:
        database.execute('ALTER TABLE entries RENAME COLUMN micros TO "cents"')
    database.close()
    with pytest.raises(UsageFault, match=r"books\.sqlite is damaged.*no such column.*every charge"):
        served()


def test_a_damaged_limiter_is_refused_with_what_is_lost(served, tmp_path):
    file = tmp_path / "var" / "limiter.sqlite"
    file.parent.mkdir()
    file.write_bytes(b"no database" * 100)
    with pytest.raises(UsageFault, match=r"limiter\.sqlite is damaged.*loses what accounts have used"):
        served()


def actor(name, state, error=""):
    return ActorStatus(name, 1, 0, state, 0, 0, 0.0, error)


def test_a_long_start_says_who_is_still_starting_and_falls_silent_when_it_is_over(
    tmp_path, monkeypatch, capsys
):
    loading = [actor("ledger", "up"), actor("batcher.0", "starting"), actor("edge.0", "down")]
    dying = [actor("batcher.0", "down", "no memory"), actor("batcher.1", "starting")]
    looks = iter([NotRunning("not yet"), loading, dying, [actor("edge.0", "down")]])

    def read_status(state):
        assert state == tmp_path
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    async def slowly(_spec, _state, *, on_ready):
        await trio.sleep(serve.QUIET + 3.5 * serve.SAY_EVERY)
        on_ready()
        await trio.sleep(100 * serve.SAY_EVERY)
        return 0

    async def nothing_to_seal(_state):
        await trio.sleep_forever()

    async def main():
        assert await serve._supervise(None, tmp_path, lambda: None) == 0

    monkeypatch.setattr(serve, "read_status", read_status)
    monkeypatch.setattr(serve, "supervise", slowly)
    monkeypatch.setattr(serve, "keep_sealing", nothing_to_seal)
    on_virtual_time(main)
    logs = tmp_path / "logs"
    assert capsys.readouterr().err.splitlines() == [
        f"antiphon: after 8 s still starting: batcher.0; its log: {logs}/batcher.0.log",
        f"antiphon: after 13 s still starting: batcher.0 (no memory), batcher.1; logs: {logs}",
    ]
    assert next(looks, None) is None


def test_what_ends_a_start_comes_out_as_it_is(tmp_path, monkeypatch):
    async def refuse(_spec, _state, *, on_ready):
        raise serve.StateInUse("another runs")

    monkeypatch.setattr(serve, "supervise", refuse)
    with pytest.raises(serve.StateInUse, match="another runs"):
        trio.run(serve._supervise, None, tmp_path, lambda: None)
