"""One owner per socket, in a directory nobody else can touch."""

import multiprocessing
import os
import socket
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from kvtierd.rpc.sockets import AlreadyRunning, OwnedSockets, SocketError, make_private_directory


def own(directory: Path) -> OwnedSockets:
    return OwnedSockets(directory / "k.sock", directory / "k.side.sock", directory / "k.sock.lock")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_the_directory_is_made_private(place: Path) -> None:
    own(place).release()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_sockets_belong_to_the_owner_alone_from_their_first_moment(place: Path) -> None:
    sockets = own(place)
    before = os.umask(0o022)
    try:
        listener = sockets.bind_side()
        assert stat.S_IMODE(sockets.side_path.lstat().st_mode) == 0o600
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    listener.close()
    sockets.release()


def test_a_release_leaves_nothing_and_lets_the_next_one_in(place: Path) -> None:
    for _ in range(2):
        sockets = own(place)
        sockets.bind_side().close()
        sockets.release()
        assert list(place.iterdir()) == []


def _hold(place: Path, ready: Connection) -> None:
    own(place).bind_side()
    ready.send(os.getpid())
    ready.recv()


def test_a_second_owner_is_told_who_has_it_and_a_dead_one_leaves_no_claim(place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=_hold, args=(place, there))
    holder.start()
    try:
        assert here.poll(30)
        pid = here.recv()
        with pytest.raises(AlreadyRunning) as error:
            own(place)
        assert error.value.pid == pid
        assert str(pid) in str(error.value)
        assert str(place / "k.sock") in str(error.value)
        assert (place / "k.side.sock").is_socket()
    finally:
        holder.kill()
        holder.join(30)
    sockets = own(place)
    assert not (place / "k.side.sock").exists(), "what the dead one left is removed, under the lock"
    sockets.release()


def test_only_sockets_are_removed(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "k.sock").write_text("precious")
    with pytest.raises(SocketError, match="no socket"):
        own(place)
    assert (place / "k.sock").read_text() == "precious"
    (place / "k.sock").unlink()
    own(place).release()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_directory_others_can_write_to_is_refused(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(SocketError, match="written by others"):
        make_private_directory(place)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SocketError, match="not a directory"):
        make_private_directory(tmp_path / "link")


def test_a_link_in_place_of_the_lock_is_refused(place: Path, tmp_path: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "k.sock.lock").symlink_to(tmp_path / "target")
    with pytest.raises(SocketError, match="lock"):
        own(place)
    assert not (tmp_path / "target").exists()


def test_a_stale_socket_does_not_stop_a_start(place: Path) -> None:
    place.mkdir(mode=0o700)
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(place / "k.side.sock"))
    stale.close()
    sockets = own(place)
    sockets.bind_side().close()
    sockets.release()
