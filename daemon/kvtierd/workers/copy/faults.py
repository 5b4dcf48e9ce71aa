"""Faults that tests ask for through the environment; nobody else sets the variable.

KVTIER_TEST_WORKER_FAULT, read once at start, makes the worker, when it has copied the bytes of a chunk:
  hang-in-copy   never go on
  slow-copy:MS   go on only after MS milliseconds
  die-in-copy    die of SIGKILL
"""

import os
import signal
import time
from collections.abc import Callable, Mapping

VARIABLE = "KVTIER_TEST_WORKER_FAULT"


def fault_in_copy(environment: Mapping[str, str]) -> Callable[[], None] | None:
    """The function to call inside each copy call, or None. Raises ValueError for a fault that does not
    exist."""
    name, _, argument = environment.get(VARIABLE, "").partition(":")
    match name:
        case "":
            return None
        case "hang-in-copy":
            return _hang
        case "slow-copy":
            delay_s = float(argument) / 1e3
            return lambda: time.sleep(delay_s)
        case "die-in-copy":
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise ValueError(f"{VARIABLE}={name}: there is no such fault")


def _hang() -> None:
    while True:
        time.sleep(3600)
