"""Runs the simulated world; a failure prints what reproduces it.

python -m tests.simulation --seed N --steps M [--oracle]
python -m tests.simulation --steps M            many seeds, M steps in all, and the coverage that CI asks for
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.report import Coverage
from tests.simulation.run import run_many, run_one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="one world only")
    parser.add_argument("--first-seed", type=int, default=1, help="of many worlds")
    parser.add_argument("--steps", type=int, default=100_000, help="stimuli, in all")
    parser.add_argument("--oracle", action="store_true", help="with the plain-Python block table")
    arguments = parser.parse_args()
    start = time.monotonic()
    coverage = Coverage()
    if arguments.seed is not None:
        run_one(arguments.seed, arguments.steps, coverage, oracle=arguments.oracle)
    else:
        run_many(arguments.first_seed, arguments.steps, coverage, oracle=arguments.oracle)
    print(coverage.text())
    print(f"{coverage.stimuli} stimuli in {time.monotonic() - start:.1f} s")
    missing = coverage.missing()
    for name in missing:
        print(f"never happened: {name}")
    return 1 if missing and arguments.seed is None else 0


if __name__ == "__main__":
    sys.exit(main())
