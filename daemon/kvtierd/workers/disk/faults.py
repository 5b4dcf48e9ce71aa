"""Faults that tests ask for through a file; nobody else sets the variable.

KVTIER_DISK_FAULTS names a file, read before each batch of operations; none there: no fault. A JSON object:
  "read", "write", "records"  {"errno": "EIO", "every": 2}: every second batch of data read or written, or
                              write of headers or records, fails so (every: 1 if it is not given)
  "delay_s"                   each batch takes so much longer
  "hang"                      true: batches wait for as long as the file says so
  "crash_after"               n: SIGKILL right after the nth persisted step since the start: a change of the
                              file's length, a write of a header, a table or record pages, a batch of data
  "no_direct"                 true, at start: as if the file system had no O_DIRECT
"""

import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "KVTIER_DISK_FAULTS"


class Faults:
    """What is to go wrong. For use from any thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get(VARIABLE)
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._steps = 0

    def strike(self, kind: str) -> int:
        """Called before a batch: waits as long as the file asks for. Returns the errno with which the batch
        fails, or 0."""
        if self._path is None:  # without even a sleep of 0 s, which would give the processor away
            return 0
        control = self._read()
        while control.get("hang"):
            time.sleep(0.02)
            control = self._read()
        time.sleep(float(control.get("delay_s", 0)))
        fault = control.get(kind)
        if not fault:
            return 0
        with self._lock:
            self._seen[kind] += 1
            if self._seen[kind] % int(fault.get("every", 1)):
                return 0
        return int(getattr(errno, fault["errno"]))

    def step(self) -> None:
        """Called after a persisted step."""
        if self._path is None:
            return
        with self._lock:
            self._steps += 1
            if self._steps == self._read().get("crash_after"):
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    @property
    def no_direct(self) -> bool:
        return bool(self._read().get("no_direct"))

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        assert isinstance(found, dict)
        return found
