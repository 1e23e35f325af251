"""One `fast_answer` replica as a process of its own, on a real mailbox, for `antiphon bench fast-answers`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from actors.fast_answer import FastAnswer, FastAnswerSettings
from supervision.actor import Actor
from supervision.context import ActorContext
from supervision.nng import open_mailbox
from supervision.process import spare_the_collector
from supervision.runtime import Runtime
from supervision.tree import Member, Tree

CLIENT = "bench.0"
REPLICAS = 4


def names() -> list[str]:
    """Name the replicas there may be."""
    return [f"fast_answer.{number}" for number in range(REPLICAS)]


def tree() -> Tree:
    """Return the tree everyone here knows: all up, at epoch 1."""
    return Tree(1, {name: Member(name, 1, "up") for name in (CLIENT, *names())})


@asynccontextmanager
async def living(actor: Actor, name: str, run_dir: Path) -> AsyncIterator[ActorContext]:
    """Run an actor on a mailbox of its own for as long as the block lasts."""
    async with open_mailbox(name, run_dir) as mailbox, trio.open_nursery() as nursery:
        runtime = Runtime(actor, mailbox, name=name, epoch=1, tree=tree())
        await nursery.start(runtime.run)
        yield runtime.context
        nursery.cancel_scope.cancel()


async def main(name: str, run_dir: Path, settings: FastAnswerSettings) -> None:
    """Run a replica; say when it is ready; end with the parent, whose end of stdin closes."""
    actor = FastAnswer(settings)
    spare_the_collector()  # as every actor's process does
    async with living(actor, name, run_dir):
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    _, replica, run, releases, follow, feedback = sys.argv
    wanted = FastAnswerSettings(releases, follow_every=float(follow), feedback_root=feedback)
    trio.run(main, replica, Path(run), wanted)
