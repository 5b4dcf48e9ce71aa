"""What happens to a daemon while engines use it."""

from __future__ import annotations

import random
import threading
from collections import Counter

from tests.support.daemon import DaemonHost

PAUSE_S = (0.3, 2.5)
FROZEN_S = (0.05, 1.5)
KINDS = ("killed", "frozen", "worker frozen", "all frozen", "worker killed")
AWAY_S = (0.0, 1.0)


class Trouble:
    """Kills, stops and restarts one daemon and its copy workers, in a thread, until it is ended."""

    def __init__(self, host: DaemonHost, seed: int) -> None:
        self._host = host
        self._chance = random.Random(f"{seed} trouble")
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.made: Counter[str] = Counter()
        """How often each kind of trouble was made."""
        self._thread = threading.Thread(target=self._run, name="trouble")
        self._thread.start()

    def end(self) -> None:
        """Ends it; the daemon runs then. Raises what went wrong."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._chance.uniform(*PAUSE_S)):
                kind = self._chance.choice(KINDS)
                self._make(kind)
                self.made[kind] += 1
        except BaseException as error:
            self._error = error

    def _make(self, kind: str) -> None:
        host = self._host
        match kind:
            case "killed":
                host.kill9()
                self._ended.wait(self._chance.uniform(*AWAY_S))
                host.start()
            case "worker killed":
                if any(worker.state == "live" for worker in host.status().workers):
                    host.kill_worker()
            case _:
                if kind == "worker frozen":
                    host.freeze_workers()
                else:
                    host.freeze(workers=kind == "all frozen")
                self._ended.wait(self._chance.uniform(*FROZEN_S))
                host.thaw()
