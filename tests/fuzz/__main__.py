"""Runs the fuzzer by hand, and keeps what it finds.

python -m tests.fuzz run TARGET FILE...      runs inputs, and shows what they break
python -m tests.fuzz fuzz TARGET [SECONDS]   fuzzes, growing build/fuzz/TARGET (needs atheris)
python -m tests.fuzz keep TARGET             takes over from there what reaches more
python -m tests.fuzz coverage [TARGET...]    lines reached by the corpus, and by as many random inputs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz import session
from tests.fuzz.coverage import compare, keep
from tests.fuzz.target import NAMES, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run inputs from files")
    run.add_argument("target", choices=NAMES)
    run.add_argument("files", nargs="+", type=Path)
    fuzz = commands.add_parser("fuzz", help="fuzz a target, and grow build/fuzz")
    fuzz.add_argument("target", choices=NAMES)
    fuzz.add_argument("seconds", nargs="?", type=int, default=60)
    keeping = commands.add_parser("keep", help="take what was found into the corpus that is committed")
    keeping.add_argument("target", choices=NAMES)
    coverage = commands.add_parser("coverage", help="compare the corpus with random inputs")
    coverage.add_argument("targets", nargs="*", default=NAMES)
    asked = parser.parse_args()
    if asked.command == "run":
        for path in asked.files:
            load(asked.target).run(path.read_bytes())
            print(f"{path}: nothing is broken")
        return 0
    if asked.command == "coverage":
        for name in asked.targets:
            print(compare(name), flush=True)
        return 0
    if asked.command == "keep":
        print(keep(asked.target, session.grown(asked.target)))
        return 0
    if not session.AVAILABLE:
        print("atheris is not installed: it has wheels for x86-64 Linux only", file=sys.stderr)
        return 2
    results = session.fuzz([asked.target], session.grown, seconds=asked.seconds)
    print(*results, sep="\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
