"""The process in which libFuzzer runs a target: python -m tests.fuzz.child TARGET OPTIONS..."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

INSTRUMENTED = ("kvtierd", "kvtier")
"""Packages whose code guides the fuzzer."""
REPO = Path(__file__).resolve().parents[2]


def main() -> None:
    name = sys.argv.pop(1)
    logging.disable()
    import kvtier_kernels  # noqa: F401 - it is native: its finder is needed for it, and for nothing else

    # The finder of an editable installation has a loader of its own, past which atheris sees no code.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
    sys.path[:0] = [str(REPO / "daemon"), str(REPO / "clients")]
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.target import load

        target = load(name)
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
