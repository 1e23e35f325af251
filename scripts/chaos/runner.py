"""One run: golden answers first, then turns and faults side by side, then quiet, then the checks."""

from __future__ import annotations

import itertools
import json
import random
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import sqlalchemy as sa

from scripts.chaos import clients, hostile, verify
from scripts.chaos.clients import Behaviour, Door
from scripts.chaos.inject import Injection, NotFired, Tree, inject, kind_of, schedule
from scripts.chaos.plan import Plan, planned
from scripts.chaos.questions import draw
from scripts.chaos.record import Evidence, Fired, Question, Violation
from scripts.chaos.report import Progress
from store.books import Books
from store.books_reconcile import reconcile
from store.books_schema import REQUESTS

OWNERS = 2
QUIET = 90.0
"""Seconds that what still runs when the clients are done may take to end."""
PROBE_LIMIT = 60.0
_TLS = ssl.create_default_context()
"""Made once: a client that makes its own takes longer over it than some recoveries."""


class Runner:
    """The state of one run. Client threads append evidence, the fault thread appends what fired."""

    def __init__(self, plan: Plan, seed: int, tree: Tree, door: Door) -> None:
        self.plan = plan
        self.tree = tree
        self.door = door
        self.rng = random.Random(seed)  # noqa: S311 - chaos must be repeatable
        self.progress = Progress(plan.name, seed, plan.turns, planned(plan))
        self.questions = [draw(plan, owner, self.rng) for owner in range(OWNERS)]
        self.golden: dict[int, str] = {}

    def run(self) -> Progress:
        """Run it all but the checks that need the tree to be stopped."""
        self._learn_golden()
        kinds = sorted({kind_of(a.name) for a in self.tree.actors()})
        faults = threading.Thread(target=self._break, args=(schedule(self.plan.faults, kinds, self.rng),))
        faults.start()
        self._talk(faults)
        faults.join()
        self._check()
        return self.progress

    def _learn_golden(self) -> None:
        for owner, questions in enumerate(self.questions):
            for question in questions:
                evidence = Evidence("sdk_whole", question, owner)
                clients.run(self.door, evidence, Behaviour(), self.rng)
                if evidence.outcome != "done":
                    raise NotFired(
                        f"no golden answer to {question.text!r}: {evidence.outcome} {evidence.detail}"
                    )
                self.golden[question.number] = evidence.text

    def _talk(self, faults: threading.Thread) -> None:
        """Ask until every planned turn is over and every fault has fired: no fault meets an idle tree."""
        numbers = itertools.count()
        rng = random.Random(self.rng.random())  # noqa: S311
        lock = threading.Lock()

        def client() -> None:
            while True:
                with lock:
                    number = next(numbers)
                    if number >= self.plan.turns and not faults.is_alive():
                        return
                    job = self._job(number, rng)
                self.progress.turns.append(self._turn(job))

        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            for running in [pool.submit(client) for _ in range(self.plan.concurrency)]:
                running.result()

    def _job(self, number: int, rng: random.Random) -> tuple[Evidence, Behaviour, random.Random]:
        owner = rng.randrange(OWNERS)
        question: Question = rng.choice(self.questions[owner])
        kind = self.plan.clients[number % len(self.plan.clients)]
        for_good = rng.random() < self.plan.abandon
        leaves = for_good or rng.random() < self.plan.disconnects
        behaviour = Behaviour(rng.randrange(1, 60) if leaves else None, for_good)
        return Evidence(kind, question, owner), behaviour, random.Random(rng.random())  # noqa: S311

    def _turn(self, job: tuple[Evidence, Behaviour, random.Random]) -> Evidence:
        evidence, behaviour, rng = job
        clients.run(self.door, evidence, behaviour, rng)
        if rng.random() < self.plan.hostile:
            self.progress.violations += hostile.provoke(self.door, rng)
        return evidence

    def _break(self, injections: list[Injection]) -> None:
        began = time.monotonic()
        for injection in injections:
            time.sleep(self.rng.expovariate(1 / self.plan.pace))
            at = time.monotonic()
            name = f"{injection.plan.kind} {injection.target}".strip()
            try:
                hit = inject(self.tree, injection, self.rng)
            except NotFired as reason:
                self.progress.not_fired.append(f"{name}: {reason}")
                continue
            recovered = self._first_good_answer(at)
            self.progress.fired.append(
                Fired(injection.plan.kind, injection.target, round(at - began, 2), recovered, hit)
            )

    def _first_good_answer(self, since: float) -> float | None:
        """Ask the shortest question until it is answered well; return how long that took since the fault."""
        question = self.questions[0][0]
        body = {**question.body(), "max_completion_tokens": 1, "fast_answers": "off"}
        while time.monotonic() - since < PROBE_LIMIT:
            try:
                answer = httpx.post(
                    f"{self.door.root}/v1/chat/completions",
                    json=body,
                    headers=self.door.headers(0),
                    timeout=30,
                    verify=_TLS,
                )
                if answer.status_code == 200 and self.golden[0].startswith(
                    answer.json()["choices"][0]["message"]["content"]
                ):
                    return round(time.monotonic() - since, 3)
            except (httpx.TransportError, json.JSONDecodeError):
                pass
            time.sleep(0.02)
        return None

    def _check(self) -> None:
        metrics = self._wait_for_quiet()
        found = self.progress.violations
        found += verify.check_turns(self.progress.turns, self.golden)
        found += verify.check_canaries(self.progress.turns, OWNERS)
        found += verify.check_figures(metrics)
        found += verify.check_recovery(self.progress.fired)
        found += verify.check_books(self.progress.turns, charged(self.tree.state))
        found += drift(self.tree.state)

    def _wait_for_quiet(self) -> str:
        end = time.monotonic() + QUIET
        text = ""
        while time.monotonic() < end:
            try:
                text = httpx.get(f"{self.door.root}/metrics", headers=self.door.headers(0), timeout=10).text
                if not verify.check_figures(text):
                    return text
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        return text


def charged(state: Path) -> dict[str, tuple[int, int]]:
    """Return what the books charged each request for: (prompt tokens, completion tokens)."""
    books = Books(state / "books.sqlite")
    try:
        with books.engine.connect() as connection:
            columns = (REQUESTS.c.request_id, REQUESTS.c.prompt_tokens, REQUESTS.c.completion_tokens)
            return {row[0]: (row[1], row[2]) for row in connection.execute(sa.select(*columns))}
    finally:
        books.close()


def drift(state: Path) -> list[Violation]:
    """C: the books agree with themselves and with what the engine witnessed."""
    books = Books(state / "books.sqlite")
    try:
        report = reconcile(books, settled_before=int(time.time() * 1000))
        return [Violation("C", f"the books drift: {each}") for each in report.drifts]
    finally:
        books.close()


def left_over(state: Path) -> list[Violation]:
    """Check what only shows when the tree was stopped."""
    return verify.check_left_over(state)
