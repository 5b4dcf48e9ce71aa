"""A fake GPU for a run with `--fake`: the steps' processes share one machine of the fake driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fake_cuda import FakeCuda
from tests.support.leaks import SHM, SHM_PREFIX

HBM_BYTES = 1 << 30
CONTEXT_BYTES = 16 << 20


@contextmanager
def fake_driver() -> Iterator[dict[str, str]]:
    """What the environment of a process needs that is to use it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}gpu-", dir=SHM))
    try:
        fake = FakeCuda(folder, hbm=HBM_BYTES, context_bytes=CONTEXT_BYTES)
        try:
            yield fake.environment
        finally:
            fake.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
