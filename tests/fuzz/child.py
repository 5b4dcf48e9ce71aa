"""The process in which libFuzzer runs a target: python -m tests.fuzz.child TARGET OPTIONS..."""

from __future__ import annotations

import logging
import sys

import atheris

INSTRUMENTED = ("kvtierd", "kvtier")
"""Packages whose code guides the fuzzer."""


def main() -> None:
    name = sys.argv.pop(1)
    logging.disable()
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.target import load

        target = load(name)
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
