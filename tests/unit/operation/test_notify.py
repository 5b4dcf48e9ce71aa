"""The notify protocol, spoken to a real datagram socket of either kind."""

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtierd.service.notify import Notifier


class Manager:
    """The other end: what a service manager would read."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address[0] == "@" else address)
        self._socket.settimeout(10)

    def heard(self) -> dict[str, str]:
        """The next message, by name."""
        lines = self._socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Manager]:
    abstract = f"@kvtier-test-{uuid.uuid4().hex}"
    manager = Manager(abstract if request.param == "abstract" else str(socket_dir / "notify"))
    yield manager
    manager.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Notifier]]:
    made = []

    def make_one(**environ: str) -> Notifier:
        made.append(Notifier(environ))
        return made[-1]

    yield make_one
    for notifier in made:
        notifier.close()


def test_ready_and_status_are_one_message(manager: Manager, make: Callable[..., Notifier]) -> None:
    make(NOTIFY_SOCKET=manager.address).ready("Serving")
    assert manager.heard() == {"READY": "1", "STATUS": "Serving"}


def test_each_kind_says_what_the_protocol_asks_for(manager: Manager, make: Callable[..., Notifier]) -> None:
    notifier = make(NOTIFY_SOCKET=manager.address)
    notifier.starting("Making the pool: 1 of 2 GiB", 60)
    assert manager.heard() == {"STATUS": "Making the pool: 1 of 2 GiB", "EXTEND_TIMEOUT_USEC": "60000000"}
    notifier.reloading()
    heard = manager.heard()
    assert heard.keys() == {"RELOADING", "MONOTONIC_USEC"}
    assert int(heard["MONOTONIC_USEC"]) > 0
    notifier.stopping("Stopping", 1.5)
    assert manager.heard() == {"STOPPING": "1", "STATUS": "Stopping", "EXTEND_TIMEOUT_USEC": "1500000"}
    notifier.alive()
    assert manager.heard() == {"WATCHDOG": "1"}


def test_a_status_cannot_smuggle_in_another_assignment(
    manager: Manager, make: Callable[..., Notifier]
) -> None:
    make(NOTIFY_SOCKET=manager.address).status("disk /mnt\nREADY=1")
    assert manager.heard() == {"STATUS": "disk /mnt READY=1"}


def test_a_full_socket_blocks_nobody_and_what_matters_is_said_later(
    manager: Manager, make: Callable[..., Notifier]
) -> None:
    notifier = make(NOTIFY_SOCKET=manager.address)
    for _ in range(10_000):
        notifier.status("busy")
    notifier.ready("Serving")
    notifier.alive()
    heard: list[dict[str, str]] = []
    while "READY" not in (heard[-1] if heard else {}):
        assert len(heard) < 10_000
        heard.append(manager.heard())
        if len(heard) == 1:
            notifier.status("Serving still")
    assert heard[-1] == {"READY": "1", "STATUS": "Serving still"}, "and no old sign of life"


def test_a_manager_that_is_gone_is_no_error(manager: Manager, make: Callable[..., Notifier]) -> None:
    notifier = make(NOTIFY_SOCKET=manager.address)
    manager.close()
    notifier.ready("Serving")
    notifier.close()
    notifier.status("after its end")


def test_without_a_manager_nothing_happens(make: Callable[..., Notifier]) -> None:
    notifier = make()
    assert not notifier.is_heard
    assert notifier.watchdog_s is None
    notifier.ready("Serving")


@pytest.mark.parametrize(
    ("microseconds", "pid", "watchdog_s"),
    [
        pytest.param("30000000", str(os.getpid()), 30.0, id="this process"),
        ("500000", "", 0.5),
        ("30000000", "1", None),
        ("0", "", None),
        ("soon", "", None),
    ],
)
def test_the_watchdog_is_taken_only_if_it_is_meant_for_this_process(
    microseconds: str, pid: str, watchdog_s: float | None, make: Callable[..., Notifier]
) -> None:
    notifier = make(NOTIFY_SOCKET="@kvtier-test", WATCHDOG_USEC=microseconds, WATCHDOG_PID=pid)
    assert notifier.watchdog_s == watchdog_s


def test_a_daemon_that_a_service_has_started_does_not_speak_for_it(make: Callable[..., Notifier]) -> None:
    assert not make(NOTIFY_SOCKET="@kvtier-test", SYSTEMD_EXEC_PID="1").is_heard
    assert make(NOTIFY_SOCKET="@kvtier-test", SYSTEMD_EXEC_PID=str(os.getpid())).is_heard


def test_no_child_inherits_the_protocol() -> None:
    environ = {"NOTIFY_SOCKET": "@kvtier-test", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "HOME": "/"}
    Notifier(environ).close()
    assert environ == {"HOME": "/"}
