"""What a service manager hears of a real daemon, over a real socket: from its start to its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.process import DEADLINE_S, Daemon, until

WATCHDOG_S = 0.6


class Manager:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def heard(self, timeout_s: float) -> dict[str, str] | None:
        """The next message by name; None if there is none for so long."""
        self._socket.settimeout(timeout_s)
        try:
            lines = self._socket.recv(4096).decode().split("\n")
        except TimeoutError:
            return None
        return dict(line.split("=", 1) for line in lines)

    def wait(self, name: str) -> list[dict[str, str]]:
        """Everything up to and with a message that has `name`."""
        messages = []
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            message = self.heard(deadline_s - time.monotonic())
            if message is not None:
                messages.append(message)
                if name in message:
                    return messages
        raise AssertionError(f"no {name} in {messages}")

    def forget(self) -> None:
        while self.heard(0.001) is not None:
            pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(socket_dir / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    monkeypatch.setenv("WATCHDOG_USEC", str(round(WATCHDOG_S * 1e6)))
    yield manager
    manager.close()


def test_it_is_ready_when_it_answers_and_not_before(
    manager: Manager, start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(pool__size="300MiB")
    messages = manager.wait("READY")
    assert daemon.status().state == "serving"
    said = [message["STATUS"] for message in messages if "STATUS" in message]
    assert said[0] == "Opening the pool"
    assert any(status.startswith("Making the pool: ") for status in said)
    assert said[-2:] == ["Starting the copy workers", said[-1]]
    assert said[-1].startswith("Serving 0 engines, 0 blocks, 0 B of ")
    assert all("EXTEND_TIMEOUT_USEC" in message for message in messages[:-1])
    environment = Path(f"/proc/{daemon.status().workers[0].pid}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment, "a worker cannot speak for the daemon"


def test_it_says_that_it_stops(manager: Manager, start: Callable[..., Daemon]) -> None:
    daemon = start()
    manager.wait("READY")
    assert daemon.stop() == 0
    *_, stopping = manager.wait("STOPPING")
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 10_000_000, "more than the time that transfers have"


def test_a_stopped_event_loop_gives_no_sign_of_life_and_one_that_goes_on_does(
    manager: Manager, start: Callable[..., Daemon]
) -> None:
    daemon = start()
    manager.wait("READY")
    for _ in range(3):
        manager.wait("WATCHDOG")
    os.kill(daemon.pid, signal.SIGSTOP)
    until(lambda: _state(daemon.pid) == "T", "the daemon stands still")
    manager.forget()
    assert manager.heard(5 * WATCHDOG_S) is None
    os.kill(daemon.pid, signal.SIGCONT)
    manager.wait("WATCHDOG")


def test_a_wedged_worker_does_not_end_the_daemon(manager: Manager, start: Callable[..., Daemon]) -> None:
    daemon = start(workers__copy_deadline_s=5)
    daemon.may_complain = True
    manager.wait("READY")
    worker = daemon.status().workers[0].pid
    os.kill(worker, signal.SIGSTOP)
    manager.forget()
    for _ in range(3):
        manager.wait("WATCHDOG")
    assert _live_workers(daemon) == [worker], "it was alive all the time"
    until(lambda: _live_workers(daemon) not in ([], [worker]), "the worker is replaced")
    manager.forget()
    manager.wait("WATCHDOG")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _live_workers(daemon: Daemon) -> list[int]:
    return [worker.pid for worker in daemon.status().workers if worker.state == "live"]
