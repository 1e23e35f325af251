"""Runs one seed and prints everything that happened: `python -m tests.simulation.replay SEED`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys

from tests.simulation.determinism import with_fixed_hashes


def main() -> None:
    """Replay the seed that the arguments name; exits 1 when it breaks a promise."""
    from tests.simulation import planted
    from tests.simulation.simulate import simulate

    parser = argparse.ArgumentParser(prog="tests.simulation.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--plant", choices=sorted(planted.BUGS))
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bug = planted.BUGS[chosen.plant] if chosen.plant else contextlib.nullcontext
    with bug():
        outcome = simulate(chosen.seed, trace=True)
    say = sys.stdout.write
    say("\n".join(outcome.trace) + "\n")
    say(f"seed {outcome.seed}, digest {outcome.digest}, {outcome.counts}\n")
    for violation in outcome.violations:
        say(f"VIOLATION {violation}\n")
    sys.exit(bool(outcome.violations))


if __name__ == "__main__":
    with_fixed_hashes("tests.simulation.replay")
    main()
