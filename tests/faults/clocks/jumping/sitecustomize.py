"""Makes clocks wrong in Python processes that have this folder in PYTHONPATH: the wall clock by up to a
decade, by another time at each reading; the monotonic clock by the seconds that the file KVTIER_TEST_CLOCK
holds."""

import os
import random
import time
from pathlib import Path

DECADE_S = 10 * 365 * 86_400
OFFSET_S = Path(os.environ["KVTIER_TEST_CLOCK"])
_wall, _monotonic, _monotonic_ns = time.time, time.monotonic, time.monotonic_ns
_chance = random.Random(os.getpid())


def _offset_s() -> float:
    return float(OFFSET_S.read_text() or 0)


def _time() -> float:
    return _wall() + _chance.uniform(-DECADE_S, DECADE_S)


time.time = _time
time.time_ns = lambda: int(_time() * 1e9)
time.monotonic = lambda: _monotonic() + _offset_s()
time.monotonic_ns = lambda: _monotonic_ns() + int(_offset_s() * 1e9)
