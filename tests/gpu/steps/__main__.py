"""`python -m tests.gpu.steps NAME --rows FILE --seconds S [--fake]`: runs one step in this process."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from tests.gpu.parts.bench import Bench, Unavailable
from tests.gpu.plan import BY_NAME


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs one step of the matrix.")
    parser.add_argument("name", choices=sorted(BY_NAME))
    parser.add_argument("--rows", type=Path, required=True, help="file that its rows are appended to")
    parser.add_argument("--seconds", type=float, default=600.0, help="it should have ended by then")
    parser.add_argument("--fake", action="store_true", help="sizes for the fake driver")
    arguments = parser.parse_args()
    step = importlib.import_module(f"tests.gpu.steps.{arguments.name}")
    try:
        step.run(Bench(arguments.rows, arguments.seconds, arguments.fake))
    except Unavailable as error:
        print(error)
        return os.EX_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
