"""How many charges a second the books take, each durable before it is acknowledged.

Charges are asked of a real ledger actor with a fixed number in flight; beside it, in the same rounds, the
same deliveries are entered one transaction each, which is what the disk's flushes alone allow.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import trio

from actors.ledger import Ledger, LedgerSettings, PriceSettings
from actors.protocol import Charge
from scripts.bench.report import Row
from store.books import Books
from store.books_posting import Delivery
from supervision.local import Client, LocalTree

NAME = "books"
CHARGES = 6000
IN_FLIGHT = 1024
ALONE = 100
ROUNDS = 3


def run() -> list[Row]:
    """Measure in a temporary directory beside the working directory, so on its disk and not in memory."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-books-") as directory:
        grouped, entered, alone = [], [], []
        for number in range(ROUNDS):
            state = Path(directory) / str(number)
            grouped.append(trio.run(_asked, state))
            entered.append(_entered(state, IN_FLIGHT, CHARGES))
            alone.append(_entered(state, 1, ALONE))
    return [
        _row("charges acknowledged by the ledger, durable", grouped, floor=5000, aim=10000),
        _row(f"deliveries entered, {IN_FLIGHT} a transaction", entered),
        _row("deliveries entered, one a transaction", alone),
    ]


def _row(name: str, rates: list[float], floor: float | None = None, aim: float | None = None) -> Row:
    return Row(name, statistics.median(rates), "1/s", floor, aim, low=min(rates), high=max(rates))


async def _asked(state: Path) -> float:
    async with LocalTree(state_dir=state) as tree:
        prices = (PriceSettings("*", prompt=150_000, completion=600_000),)
        await tree.start("ledger", Ledger(LedgerSettings(prices=prices)), capacity=IN_FLIGHT)
        client = tree.client("session.0", capacity=IN_FLIGHT)
        numbers = iter(range(CHARGES))
        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(_ask, client, numbers)
        rate = CHARGES / (time.perf_counter() - begun)
        await tree.stop("ledger")
    return rate


async def _ask(client: Client, numbers: Iterator[int]) -> None:
    for number in numbers:
        await client.ask(
            "ledger", Charge(f"ask-{number}", "acme", "key", "m", 40, 0, ((0, 0, 64),)), timeout=60
        )


def _entered(state: Path, group: int, count: int) -> float:
    books = Books(state / "books.sqlite")
    deliveries = [Delivery(f"{group}-{n}", "acme", "key", "m", 40, 0, ((0, 0, 64),)) for n in range(count)]
    begun = time.perf_counter()
    for start in range(0, count, group):
        books.enter(deliveries[start : start + group], 0)
    rate = count / (time.perf_counter() - begun)
    books.close()
    return rate
