"""The packet channel, on both event loops, over real socket pairs."""

import array
import asyncio
import itertools
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from kvtierd.workers.channel.packets import (
    FDS_MAX,
    PACKET_BYTES_MAX,
    BlockingPacketChannel,
    ChannelEndedError,
    PacketChannel,
    PacketError,
    packet_socketpair,
    prepare,
)

SLACK_S = 20.0
PART_OF_8192_BLOCKS_BYTES = 8_192 * 17 + 64


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = set(os.listdir("/proc/self/fd")) - before
    # The first uvloop of a process keeps a pipe; descriptors of ours are sockets and memfds.
    ours = [fd for fd in left if _names(fd).startswith(("socket:", "/memfd:"))]
    assert not ours, [(fd, _names(fd)) for fd in ours]


def _names(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@dataclass
class End:
    """A channel that keeps what it got."""

    packets: list[bytes] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    channel: PacketChannel = field(init=False)

    def packet(self, packet: bytes, fds: list[int]) -> None:
        self.packets.append(packet)
        self.fds += fds

    def open(self, sock: socket.socket, **limits: int) -> "End":
        self.channel = PacketChannel(sock, self.packet, self.reasons.append, **limits)
        return self


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + SLACK_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    left, right = packet_socketpair()
    ends = End().open(left), End().open(right)
    yield ends
    for end in ends:
        end.channel.close()
        for fd in end.fds:
            os.close(fd)
    await asyncio.sleep(0)


async def test_packets_arrive_whole_and_in_order(ends: tuple[End, End]) -> None:
    left, right = ends
    sent = [bytes([i % 251]) * (1 + i * 37 % 4_000) for i in range(500)]
    for packet in sent:
        assert left.channel.send(packet)
    await until(lambda: len(right.packets) == len(sent))
    assert right.packets == sent


async def test_both_ends_may_send_the_largest_packets_at_once(ends: tuple[End, End]) -> None:
    largest = os.urandom(PACKET_BYTES_MAX)
    for end in ends:
        for _ in range(50):
            assert end.channel.send(largest)
    await until(lambda: all(len(end.packets) == 50 for end in ends))
    assert all(packet == largest for end in ends for packet in end.packets)
    assert ends[0].channel.queued == (0, 0)


@pytest.mark.parametrize("send_buffer", [212_992 // 2, 212_992], ids=["wmem_default", "wmem_max"])
async def test_the_largest_part_fits_the_kernel_s_default_buffers(send_buffer: int) -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        assert a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * send_buffer
        b.setblocking(False)
        assert PART_OF_8192_BLOCKS_BYTES < PACKET_BYTES_MAX
        assert a.send(b"x" * PACKET_BYTES_MAX) == PACKET_BYTES_MAX
        assert len(b.recv(PACKET_BYTES_MAX)) == PACKET_BYTES_MAX


async def test_descriptors_travel_and_stay_the_sender_s(ends: tuple[End, End]) -> None:
    left, right = ends
    memfd = os.memfd_create("channel-test")
    os.write(memfd, b"hello")
    left.channel.send(b"one", [memfd])
    os.close(memfd)
    await until(lambda: right.packets)
    [received] = right.fds
    assert os.pread(received, 5, 0) == b"hello"
    assert not os.get_inheritable(received)


async def test_queued_descriptors_outlive_the_sender_s_copy(ends: tuple[End, End]) -> None:
    left, right = ends
    while left.channel.queued[0] == 0:
        left.channel.send(b"x" * PACKET_BYTES_MAX)
    memfd = os.memfd_create("channel-test")
    left.channel.send(b"last", [memfd])
    os.close(memfd)
    await until(lambda: right.packets and right.packets[-1] == b"last")
    assert len(right.fds) == 1


async def test_descriptors_that_would_have_to_wait_and_do_not_fit_are_refused_whole(
    ends: tuple[End, End],
) -> None:
    left, right = ends
    while not left.channel.queued[0]:
        assert left.channel.send(b"x" * PACKET_BYTES_MAX)
    memory = os.memfd_create("test")
    before = os.listdir("/proc/self/fd")
    free = (number for number in itertools.count() if str(number) not in before)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, FDS_MAX // 2, None)), limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            left.channel.send(b"chunks", [memory] * FDS_MAX)
        assert len(os.listdir("/proc/self/fd")) == len(before), "no copy is left"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert left.channel.send(b"chunks", [memory] * FDS_MAX), "the channel goes on"
    await until(lambda: right.packets and right.packets[-1] == b"chunks")
    assert len(right.fds) == FDS_MAX
    os.close(memory)


async def test_an_overflowing_queue_closes_the_channel_and_says_so(ends: tuple[End, End]) -> None:
    ends[1].channel.close()
    await asyncio.sleep(0)
    a, silent = packet_socketpair()
    with silent:
        end = End().open(a, queue_packets_max=3)
        memfd = os.memfd_create("channel-test")
        results = []
        while not end.channel.closed:
            results.append(end.channel.send(b"x" * PACKET_BYTES_MAX, [memfd]))
        os.close(memfd)
        assert results[-1] is False
        assert all(results[:-1])
        assert end.reasons == []  # never from inside `send`
        await until(lambda: end.reasons)
        assert "queue is full" in end.reasons[0]
        assert end.channel.send(b"x") is False


async def test_a_bound_in_bytes_holds_as_well(ends: tuple[End, End]) -> None:
    a, silent = packet_socketpair()
    with silent:
        end = End().open(a, queue_bytes_max=PACKET_BYTES_MAX)
        while end.channel.send(b"x" * PACKET_BYTES_MAX):
            pass
        await until(lambda: end.reasons)
        assert "queue is full" in end.reasons[0]


async def test_the_end_of_the_peer_is_told_once(ends: tuple[End, End]) -> None:
    left, right = ends
    left.channel.send(b"last words")
    left.channel.close("done here")
    await until(lambda: right.reasons)
    assert right.packets == [b"last words"]
    assert right.reasons == ["the peer closed the connection"]
    right.channel.close()
    left.channel.close()
    await asyncio.sleep(0.01)
    assert left.reasons == ["done here"]
    assert len(right.reasons) == 1


async def test_last_words_arrive_though_the_peer_never_read_its_own(ends: tuple[End, End]) -> None:
    """A killed worker leaves unread packets; the kernel then reports a reset before what it had sent."""
    a, peer = packet_socketpair()
    end = End().open(a)
    end.channel.send(b"never read")
    peer.send(b"PartFinished 1")
    peer.send(b"PartFinished 2")
    peer.close()
    assert end.channel.send(b"too late")
    await until(lambda: end.reasons)
    assert end.packets == [b"PartFinished 1", b"PartFinished 2"]


async def test_drain_hands_on_what_has_already_arrived() -> None:
    a, peer = packet_socketpair()
    end = End().open(a)
    for i in range(200):
        peer.send(b"%d" % i)
    peer.close()
    end.channel.drain()
    assert end.packets == [b"%d" % i for i in range(200)]
    assert end.channel.closed
    await until(lambda: end.reasons)


async def test_an_oversized_packet_closes_the_channel_and_its_descriptors() -> None:
    a, peer = packet_socketpair()
    with peer:
        end = End().open(a)
        memfd = os.memfd_create("channel-test")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd]))]
        peer.sendmsg([b"x" * (PACKET_BYTES_MAX + 1)], rights)
        os.close(memfd)
        await until(lambda: end.reasons)
        assert "larger than" in end.reasons[0]
        assert end.packets == []


async def test_too_many_descriptors_close_the_channel_and_all_of_them() -> None:
    a, peer = packet_socketpair()
    with peer:
        end = End().open(a)
        memfd = os.memfd_create("channel-test")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd] * (FDS_MAX + 3)))]
        peer.sendmsg([b"x"], rights)
        os.close(memfd)
        await until(lambda: end.reasons)
        assert "descriptors of a packet were cut off" in end.reasons[0]
        assert end.packets == []


async def test_an_empty_packet_is_the_end_and_its_descriptors_are_closed() -> None:
    a, peer = packet_socketpair()
    with peer:
        end = End().open(a)
        memfd = os.memfd_create("channel-test")
        peer.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd]))])
        os.close(memfd)
        await until(lambda: end.reasons)
        assert end.packets == []


async def test_what_cannot_be_a_packet_is_refused_before_it_is_sent(ends: tuple[End, End]) -> None:
    left, right = ends
    with pytest.raises(ValueError, match="1 to"):
        left.channel.send(b"")
    with pytest.raises(ValueError, match="1 to"):
        left.channel.send(b"x" * (PACKET_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="descriptors"):
        left.channel.send(b"x", [0] * (FDS_MAX + 1))
    left.channel.send(b"still fine")
    await until(lambda: right.packets)


async def test_closing_from_a_packet_handler_stops_reading() -> None:
    a, peer = packet_socketpair()
    with peer:
        got: list[bytes] = []
        reasons: list[str] = []

        def on_packet(packet: bytes, fds: list[int]) -> None:
            got.append(packet)
            channel.close("enough")

        channel = PacketChannel(a, on_packet, reasons.append)
        peer.send(b"one")
        peer.send(b"two")
        await until(lambda: reasons)
        assert (got, reasons) == ([b"one"], ["enough"])


def test_other_sockets_are_refused() -> None:
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ValueError, match="SEQPACKET"):
        prepare(sock)


def test_the_blocking_twin_speaks_the_same_packets() -> None:
    a, b = packet_socketpair()
    left, right = BlockingPacketChannel(a), BlockingPacketChannel(b)
    memfd = os.memfd_create("channel-test")
    assert not right.wait(0)
    left.send(b"x" * PACKET_BYTES_MAX, [memfd])
    os.close(memfd)
    assert right.wait(SLACK_S)
    received = right.receive()
    assert received is not None
    assert received[0] == b"x" * PACKET_BYTES_MAX
    os.close(received[1][0])
    a.sendmsg([b"x" * (PACKET_BYTES_MAX + 1)])
    with pytest.raises(PacketError):
        right.receive()
    left.close()
    assert right.receive() is None
    with pytest.raises(ChannelEndedError):
        right.send(b"anyone?")
    right.close()
