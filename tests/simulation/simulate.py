"""One seed: a tree, some clients, a storm, quiet, and the question whether every promise was kept."""

from __future__ import annotations

import logging
import random

import trio
from attrs import field, frozen

from supervision.local import LocalTree
from tests.simulation import clients, determinism, faults, invariants
from tests.simulation.clients import Client
from tests.simulation.state import fresh_state
from tests.simulation.world import World, stores_of

QUIET = 60.0
"""Virtual seconds within which everything must come to rest after the storm."""


@frozen
class Outcome:
    """What a seed showed. `digest` names the whole run: equal seeds give equal digests."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    counts: dict[str, int]
    trace: tuple[str, ...] = field(default=(), repr=False)


def simulate(seed: int, *, trace: bool = False) -> Outcome:
    """Run one seed."""
    logging.disable(logging.NOTSET if trace else logging.CRITICAL)
    made: list[World] = []

    async def main() -> None:
        async with LocalTree(state_dir=state) as tree:
            made.append(_world(seed, tree, trace=trace))
            await _live(made[0], random.Random(f"{seed}/clients"))

    def at_thread() -> None:
        made[0].at_thread()

    with fresh_state() as state, stores_of(lambda: made[0]):
        determinism.run_seeded(seed, main, at_thread)
    world = made[0]
    return Outcome(seed, tuple(world.violations), world.digest, dict(world.counts), tuple(world.trace or ()))


def _world(seed: int, tree: LocalTree, *, trace: bool) -> World:
    rng = random.Random(f"{seed}/plan")
    batchers = [f"batcher.{n}" for n in range(rng.choice((1, 2)))]
    sessions = [f"session.{n}" for n in range(rng.choice((1, 1, 2)))]
    guards = ["safety.0", "safety_fallback", "router", "fast_answer.0"]
    names = ("ledger", "limiter", *guards, *batchers, *sessions, "edge.0", "edge.1")
    plan = faults.draw(rng, names)
    pace = rng.choice((0.005, 0.02, 0.05))
    places = rng.choice((2000, 2000, 1))
    return World(plan, rng, tree.state_dir, names, pace, places, tree, trace=[] if trace else None)


async def _live(world: World, rng: random.Random) -> None:
    async with trio.open_nursery() as nursery:
        world.calm()
        await world.run(nursery)
        world.network.is_stormy = world.disk.is_stormy = True
        edges = tuple(name for name in world.names if name.startswith("edge"))
        everyone = [
            Client(world, clients.draw(rng, number), edges, random.Random(rng.random()))
            for number in range(rng.choice((1, 2, 2, 3)))
        ]
        with trio.move_on_after(faults.STORM_SECONDS + QUIET) as patience:
            async with trio.open_nursery() as people:
                people.start_soon(_storm, world)
                for client in everyone:
                    people.start_soon(client.run)
            await _rest(world)
            await _probe(world, everyone, edges)
            await _rest(world)
        if patience.cancelled_caught:
            waiting = [c.wish.name for c in everyone if not c.is_over]
            world.violation(f"A/F: no rest: waiting {waiting}, left {invariants.residue(world)}")
        else:
            for what in invariants.check(world, everyone):
                world.violation(what)
        nursery.cancel_scope.cancel()


async def _storm(world: World) -> None:
    await world.kill_by_plan()
    world.calm()


async def _rest(world: World) -> None:
    """Wait until nothing is left of anything."""
    while invariants.residue(world):  # noqa: ASYNC110 - it is looked at from outside: nobody tells
        await trio.sleep(0.25)


async def _probe(world: World, everyone: list[Client], edges: tuple[str, ...]) -> None:
    """After all that, a good request gets the golden text at the first attempt, at once (G, H)."""
    began = trio.current_time()
    client = Client(world, clients.probe(99), edges, random.Random(0))
    everyone.append(client)
    await client.run()
    took = trio.current_time() - began
    if len(client.attempts) > 1 or took > 2.0 + 40 * world.pace:
        world.violation(f"H: the next good request took {took:.1f} s, {len(client.attempts)} attempts")
