"""Runs seeds and prints a line of JSON for each: `python -m tests.simulation.run SEED…`, or `FROM:TO[:STEP]`.

With a planted bug it stops at the first seed that finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import traceback

from tests.simulation.determinism import with_fixed_hashes


def _range(text: str) -> range:
    first, *rest = map(int, text.split(":"))
    return range(first, *rest) if rest else range(first, first + 1)


def main() -> None:
    """Run the seeds that the arguments name."""
    from tests.simulation import planted
    from tests.simulation.simulate import Outcome, simulate

    parser = argparse.ArgumentParser(prog="tests.simulation.run", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=_range)
    parser.add_argument("--plant", choices=sorted(planted.BUGS))
    chosen = parser.parse_args()
    bug = planted.BUGS[chosen.plant] if chosen.plant else contextlib.nullcontext
    for number, seed in enumerate(seed for seeds in chosen.seeds for seed in seeds):
        try:
            with bug():
                outcome = simulate(seed)
        except Exception:  # noqa: BLE001 - the simulation itself broke: that is a find, too
            outcome = Outcome(seed, (traceback.format_exc(),), "", {})
        facts = {"seed": seed, "violations": outcome.violations, "digest": outcome.digest, **outcome.counts}
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        if chosen.plant and outcome.violations:
            sys.exit()
        if number % 20 == 0:
            gc.collect()


if __name__ == "__main__":
    with_fixed_hashes("tests.simulation.run")
    main()
