"""The process in which libFuzzer runs targets, as `session` starts it."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import atheris

from tests.fuzz.marks import BEGIN, ENDED

INSTRUMENTED = ("kvtierd", "kvtier")
"""Packages whose code guides the fuzzer."""
REPO = Path(__file__).resolve().parents[2]


def main() -> None:
    """Takes a JSON list of (target, options of libFuzzer). The code is made ready once, and each target then
    has a fork, because libFuzzer ends its process. Exits with 1 if one of them broke."""
    jobs = json.loads(sys.argv[1])
    logging.disable()
    import kvtier_kernels  # noqa: F401 - it is native: its finder is needed for it, and for nothing else

    # The finder of an editable installation has a loader of its own, past which atheris sees no code.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
    sys.path[:0] = [str(REPO / "daemon"), str(REPO / "clients")]
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.target import load

        targets = {name: load(name) for name, _ in jobs}
    for target in targets.values():
        for function in target.guides:
            atheris.instrument_func(function)
    worst = 0
    for name, options in jobs:
        print(f"{BEGIN}{name}", flush=True)
        if (pid := os.fork()) == 0:
            atheris.Setup([sys.argv[0], *options], targets[name].run)
            atheris.Fuzz()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(f"{ENDED}{status}", flush=True)
        worst = max(worst, abs(status))
    sys.exit(worst != 0)


if __name__ == "__main__":
    main()
