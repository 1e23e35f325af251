"""A reader who leaves before the end of the output, as `head` does, is no fault of the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.books import Books
from store.books_posting import Delivery

ROOT = Path(__file__).parents[2]


def unread(*words, unbuffered):
    """Run a command whose output nobody reads; return its exit code and what it said on stderr."""
    command = [sys.executable, "-m", "scripts.cli", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        child.stdout.close()
        said = child.stderr.read()
    return child.returncode, said


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["ledger export", "release list", "catalog seal --json"])
def test_a_command_whose_reader_leaves_ends_quietly(tmp_path, command, unbuffered):
    books = Books(tmp_path / "books.sqlite")
    books.enter([Delivery(f"r{i}", "acme", "k", "m", 5, 0, ((0, 0, 10),)) for i in range(200)], 1)
    books.close()
    assert unread(*command.split(), "--state", str(tmp_path), unbuffered=unbuffered) == (141, "")
