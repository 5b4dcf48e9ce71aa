"""A client says nothing to somebody whom it has no reason to trust."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import kvtier
import pytest
from kvtier.connection import trust
from kvtier.connection.address import Address, resolve
from kvtier.connection.side_socket import SideSocket
from kvtier.errors import ConnectionLostError, KvtierError
from kvtier_engine import autostart

from tests.support.process import until

STRANGER, DAEMON = 4242, 4243
Give = Callable[[Path, int], None]


@pytest.fixture
def give() -> Give:
    """Gives files to a user. Only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    return lambda path, uid: os.chown(path, uid, uid, follow_symlinks=False)


@pytest.fixture
def common(socket_dir: Path) -> Path:
    """A folder in which everybody may make folders, as /tmp is."""
    folder = socket_dir / "common"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def listening() -> Iterator[Callable[[Path], Address]]:
    """Listens at a path and beside it, and proves at the end that nobody has said anything."""
    listeners: list[socket.socket] = []

    def listen(path: Path) -> Address:
        address = Address(path)
        for kind, place in ((socket.SOCK_STREAM, path), (socket.SOCK_SEQPACKET, address.side_socket)):
            listeners.append(socket.socket(socket.AF_UNIX, kind))
            listeners[-1].bind(os.fspath(place))
            listeners[-1].listen(8)
        return address

    yield listen
    for each in listeners:
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = each.accept()
                assert accepted.recv(1) == b"", "something was said"
                accepted.close()
        each.close()


def folder_in(common: Path, mode: int = 0o755) -> Path:
    folder = common / "kvtier"
    folder.mkdir()
    folder.chmod(mode)
    return folder


def test_ones_own_folder_is_trusted(common: Path, listening: Callable[[Path], Address]) -> None:
    address = listening(folder_in(common) / "k.sock")
    before = set(os.listdir("/proc/self/fd"))
    trust.require_listener(address)
    assert set(os.listdir("/proc/self/fd")) <= before, "it keeps nothing open"


def test_a_folder_that_a_stranger_made_first_is_not(
    common: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    address = listening(folder_in(common) / "k.sock")
    give(address.socket.parent, STRANGER)
    told = rf"nothing was said .*/k\.sock: .*/kvtier belongs to user {STRANGER}, whom .* no reason to trust"
    with pytest.raises(ConnectionLostError, match=rf"{told}.*KVTIER_DAEMON_USER={STRANGER}$"):
        trust.require_listener(address)


def test_a_folder_that_root_gave_the_daemon_is(
    socket_dir: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    """As /run/kvtier: nobody but root can have made it so."""
    address = listening(folder_in(socket_dir) / "k.sock")
    for path in (address.socket.parent, address.socket, address.side_socket):
        give(path, DAEMON)
    assert trust.trusted_by_place(address.socket) >= {0, DAEMON}
    trust.require_listener(address)


def test_a_strangers_folder_below_a_trusted_one_is_no_better(
    common: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    own = folder_in(common, 0o1777)
    (own / "below").mkdir()
    address = listening(own / "below" / "k.sock")
    give(own / "below", STRANGER)
    with pytest.raises(ConnectionLostError, match=f"below belongs to user {STRANGER}"):
        trust.require_listener(address)


def test_a_socket_that_a_stranger_put_where_everybody_may_is_not(
    common: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    address = listening(common / "k.sock")
    give(address.socket, STRANGER)
    with pytest.raises(ConnectionLostError, match=rf"k\.sock belongs to user {STRANGER}"):
        trust.require_listener(address)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o773])
def test_a_folder_in_which_others_can_exchange_the_socket_is_not(
    socket_dir: Path, listening: Callable[[Path], Address], mode: int
) -> None:
    address = listening(folder_in(socket_dir, mode) / "k.sock")
    with pytest.raises(
        ConnectionLostError,
        match=rf"users besides its owner can exchange .*mode {mode:04o}\), .*; chmod go-w /",
    ):
        trust.require_listener(address)


def test_nor_is_one_that_members_of_another_group_can(
    socket_dir: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    address = listening(folder_in(socket_dir, 0o770) / "k.sock")
    trust.require_listener(address)  # root's own group has no other member
    os.chown(address.socket.parent, 0, STRANGER)
    with pytest.raises(ConnectionLostError, match="users besides its owner can exchange"):
        trust.require_listener(address)


def test_links_are_followed_and_judged(
    common: Path, socket_dir: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    """Whoever owns a link decides where it leads; whoever owns where it leads, who listens."""
    address = listening(folder_in(socket_dir) / "k.sock")
    link = common / "link"
    link.symlink_to(address.socket.parent)
    trust.require_listener(Address(link / "k.sock"))
    give(link, STRANGER)
    with pytest.raises(ConnectionLostError, match=f"link belongs to user {STRANGER}"):
        trust.require_listener(Address(link / "k.sock"))
    stranger = folder_in(common)
    give(stranger, STRANGER)
    own = socket_dir / "own"
    own.symlink_to(stranger)
    listening(stranger / "k.sock")
    with pytest.raises(ConnectionLostError, match=f"kvtier belongs to user {STRANGER}"):
        trust.require_listener(Address(own / "k.sock"))


def test_each_link_on_the_way_is_judged_not_only_the_first_and_the_end(
    common: Path, socket_dir: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    """Or a stranger could let it lead somewhere else, once we have looked."""
    address = listening(folder_in(socket_dir) / "k.sock")
    strangers, own = common / "strangers", socket_dir / "own"
    strangers.symlink_to(address.socket.parent)
    own.symlink_to("common/../common/strangers")
    trust.require_listener(Address(own / "k.sock"))
    give(strangers, STRANGER)
    with pytest.raises(ConnectionLostError, match=f"strangers belongs to user {STRANGER}"):
        trust.require_listener(Address(own / "k.sock"))


def test_links_in_a_circle_end(socket_dir: Path) -> None:
    (socket_dir / "a").symlink_to("b")
    (socket_dir / "b").symlink_to("a")
    with pytest.raises(ConnectionLostError, match="symbolic links"):
        trust.trusted_by_place(socket_dir / "a" / "k.sock")


def test_who_listens_counts_not_only_where(
    socket_dir: Path, give: Give, listening: Callable[[Path], Address]
) -> None:
    """A stranger who listens in a folder of ours, because somebody let them: the kernel knows."""
    path = folder_in(socket_dir) / "k.sock"
    for folder in (socket_dir, path.parent):
        folder.chmod(0o777)
    os.seteuid(STRANGER)
    try:
        address = listening(path)
    finally:
        os.seteuid(0)
    for each in (address.socket, address.side_socket):
        give(each, 0)
    for folder in (socket_dir, path.parent):
        folder.chmod(0o755)
    with pytest.raises(ConnectionLostError, match=f"a process of user {STRANGER} listens there"):
        trust.require_listener(address)
    with pytest.raises(ConnectionLostError, match=f"a process of user {STRANGER} listens there"):
        SideSocket(address)
    trust.require_listener(Address(path, STRANGER))
    with pytest.raises(ConnectionLostError, match=f"a process of user {STRANGER} listens there"):
        trust.require_listener(Address(path, DAEMON))


def test_a_client_says_nothing_to_a_stranger_and_misses(
    common: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    address = listening(folder_in(common) / "k.sock")
    give(address.socket.parent, STRANGER)
    with kvtier.Client(
        instance="engine",
        namespace=kvtier.Namespace(model="model", kv_dtype="uint8", hash_scheme="none", salt="secret"),
        role=kvtier.Role.SCHEDULER,
        socket=address.socket,
    ) as client:
        until(lambda: "nothing was said" in client.status.last_error, "the client says why")
        assert client.lookup([b"h" * 32]).hits == 0
        with pytest.raises(autostart.AutostartError, match="nothing was said"):
            autostart.ensure(str(address.socket))
        assert autostart.wait(str(address.socket), 0) is False


def test_a_named_user_makes_the_place_count_no_more(
    socket_dir: Path, listening: Callable[[Path], Address]
) -> None:
    """As for a folder that the containers of one pod share, which everybody in it may write to."""
    address = listening(folder_in(socket_dir, 0o777) / "k.sock")
    trust.require_listener(Address(address.socket, DAEMON))


def test_users_whom_a_namespace_does_not_know_are_nobody_in_particular(
    common: Path, listening: Callable[[Path], Address], give: Give
) -> None:
    address = listening(folder_in(common) / "k.sock")
    give(address.socket.parent, trust.OVERFLOW_UID)
    with pytest.raises(ConnectionLostError, match=f"\\({trust.OVERFLOW_UID}\\)"):
        trust.require_listener(address)


def test_a_missing_socket_is_said_to_be_missing(socket_dir: Path) -> None:
    with pytest.raises(ConnectionLostError, match=r"no daemon listens at .*/k\.sock, which does not exist"):
        trust.require_listener(Address(socket_dir / "k.sock"))


def test_the_daemons_user_is_named_by_name_or_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_DAEMON_USER", raising=False)
    assert resolve("/k.sock").daemon_user is None
    monkeypatch.setenv("KVTIER_DAEMON_USER", "root")
    assert resolve("/k.sock").daemon_user == 0
    monkeypatch.setenv("KVTIER_DAEMON_USER", str(DAEMON))
    assert resolve("/k.sock").daemon_user == DAEMON
    monkeypatch.setenv("KVTIER_DAEMON_USER", "nobody-of-that-name")
    with pytest.raises(KvtierError, match=r"no such user here.*KVTIER_DAEMON_USER=nobody-of-that-name"):
        resolve("/k.sock")
