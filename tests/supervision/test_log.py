import ast
import io
import json
import logging
from pathlib import Path

import pytest

from supervision import log
from supervision.errors import CannotGoOn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lines():
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    log.install("session.0", 7, stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_says_who_what_and_the_facts(lines):
    logging.getLogger("x").info("dead letter", extra={"fields": {"reason": "late", "total": 3}})
    (line,) = lines()
    assert line["actor"] == "session.0"
    assert line["epoch"] == 7
    assert (line["event"], line["reason"], line["total"]) == ("dead letter", "late", 3)
    assert line["time"].endswith("Z")


def test_no_caller_gives_facts_that_no_line_would_hold():
    wrong = []
    for room in ("actors", "gpu", "scripts", "store", "supervision"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "extra":
                    keys = [ast.literal_eval(key) for key in getattr(node.value, "keys", [])]
                    wrong += [f"{path}:{node.value.lineno}"] if keys != ["fields"] else []
    assert wrong == []


def test_an_exception_is_logged_without_its_words(lines):
    error = ExceptionGroup("outer", [ValueError("the user's secret")])
    logging.getLogger("x").error("actor died", exc_info=error)
    (line,) = lines()
    assert line["exception"] == "ValueError"
    assert "secret" not in json.dumps(line)


def test_a_description_names_type_and_place_or_words():
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert log.describe(caught.value).startswith("ZeroDivisionError at test_log.py:")
    assert log.describe(caught.value, with_words=True) == "ZeroDivisionError: division by zero"


def test_an_actor_that_cannot_go_on_says_so_in_its_own_words():
    error = ExceptionGroup("outer", [CannotGoOn("the GPU is\n gone")])
    assert log.describe(error) == "the GPU is gone"
