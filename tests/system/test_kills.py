"""SIGKILL and SIGSTOP of each actor of the real tree, while idle: healed, and the next chat answers."""

import os
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

GOLDEN = "The capital of France is Paris."
ACTORS = [
    "ledger",
    "limiter",
    "safety.0",
    "safety_fallback",
    "router",
    "fast_answer.0",
    "batcher.0",
    "session.0",
    "edge.0",
]


def answers(served) -> bool:
    return served.ask() == GOLDEN


def healed(served, name: str, epoch: int) -> bool:
    actor = served.actors()[name]
    return (
        actor.state == "up" and actor.epoch > epoch and all(a.state == "up" for a in served.actors().values())
    )


def test_the_list_of_actors_is_the_whole_tree(served):
    assert sorted(served.actors()) == sorted(ACTORS)


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_an_idle_actor_comes_back_with_a_higher_epoch_and_the_next_chat_answers(served, name, how):
    before = served.actors()[name]
    os.kill(before.pid, how)
    served.wait(lambda: healed(served, name, before.epoch), f"{name} is up again")
    assert served.wait(lambda: answers(served), "the next chat answers") < 90
    after = served.actors()[name]
    assert after.restarts > before.restarts
    assert after.pid != before.pid
