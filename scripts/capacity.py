"""`antiphon capacity`: the replicas of fast_answer a load needs, from a measured rate and assumptions."""

from __future__ import annotations

import argparse
import math

from attrs import asdict, field, frozen
from attrs.validators import ge, gt, lt

from scripts.catalog_cli import print_json
from scripts.failure import UsageFault

SECONDS_A_DAY = 86_400
FINITE = lt(math.inf)


@frozen
class Load:
    """What is expected. The defaults are a very large chat service's."""

    messages_per_day: float = field(default=2.5e9, validator=[gt(0), FINITE])
    messages_per_conversation: float = field(default=3.0, validator=[ge(1), FINITE])
    """Only the first one of each is looked up."""
    peak_factor: float = field(default=3.0, validator=[ge(1), FINITE])
    """Peak rate over the day's average."""
    headroom: float = field(default=1.5, validator=[ge(1), FINITE])
    """For spikes, a replica that died, a release that rolls out."""
    lookups_per_second: float = field(default=30_000.0, validator=[gt(0), FINITE])
    """Of one replica, measured: `antiphon bench fast-answers`."""
    reviewers: int = field(default=20, validator=ge(0))
    review_hours_per_day: float = field(default=6.0, validator=[ge(0), FINITE])
    review_seconds: float = field(default=60.0, validator=[gt(0), FINITE])
    """One reviewer, one decision."""
    build_days: int = field(default=30, validator=ge(1))
    """Of reviewing, until the catalog is served."""
    entry_bytes: float = field(default=2600.0, validator=[gt(0), FINITE])


@frozen
class Capacity:
    """What follows. Rates are per second."""

    first_turns_average: float
    first_turns_peak: float
    replicas: int
    reviews_per_day: float
    catalog_entries: float
    catalog_bytes: float


def capacity(load: Load) -> Capacity:
    """Apply the formulas.

    average = messages per day / 86,400 / messages per conversation
    peak = average x peak factor
    replicas = ceil(peak / lookups per second of one replica x headroom)
    reviews per day = reviewers x hours x 3,600 / seconds a review
    entries <= reviews per day x days
    """
    average = load.messages_per_day / SECONDS_A_DAY / load.messages_per_conversation
    peak = average * load.peak_factor
    reviews = load.reviewers * load.review_hours_per_day * 3600 / load.review_seconds
    entries = reviews * load.build_days
    return Capacity(
        first_turns_average=average,
        first_turns_peak=peak,
        replicas=math.ceil(peak / load.lookups_per_second * load.headroom),
        reviews_per_day=reviews,
        catalog_entries=entries,
        catalog_bytes=entries * load.entry_bytes,
    )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon capacity`: a flag for each assumption."""
    parser = subparsers.add_parser("capacity", help="replicas of fast_answer for a load")
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="N")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Print the assumptions and what follows from them."""
    try:
        load = Load(**{name: getattr(args, name) for name in asdict(Load())})
    except ValueError as error:
        raise UsageFault(str(error)) from error
    found = capacity(load)
    if args.json:
        print_json({"assumptions": asdict(load), "capacity": asdict(found)})
        return 0
    print("assumed")
    for name, value in asdict(load).items():
        print(f"  {name.replace('_', ' '):28} {value:>18,.10g}")
    print("follows")
    for name, value in asdict(found).items():
        print(f"  {name.replace('_', ' '):28} {value:>18,.0f}")
    return 0
