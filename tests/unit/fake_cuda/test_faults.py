"""Failures and hangs on demand, here and in other processes; the driver's version and environment."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_cuda import FakeCuda, build, environment_of
from tests.support.process import until
from tests.unit.fake_cuda.host import Host
from tests.unit.fake_cuda.peer import Peer
from tests.unit.fake_cuda.raw import ANY, Failed, Raw
from tests.unit.fake_cuda.refusals import refused

MIB = 1 << 20
BIN = Path(__file__).parent


def test_the_nth_call_fails_once(make_fake_cuda: Callable[..., FakeCuda]):
    raw = Raw(make_fake_cuda(fail="cuMemAlloc:2:2,cuMemFree_v2:1:1").library).start()
    address = raw.alloc(MIB)
    refused(2, raw.alloc, MIB)
    raw.alloc(MIB)
    refused(1, raw.free, address)
    raw.free(address)


def test_every_call_fails_if_wanted(make_fake_cuda: Callable[..., FakeCuda]):
    raw = Raw(make_fake_cuda(fail="cuInit:*:100").library)
    assert [raw.code("cuInit", 0) for _ in range(3)] == [100, 100, 100]


@pytest.mark.parametrize("code", [214, 219, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999])
def test_a_sticky_code_stays_for_the_process(make_fake_cuda: Callable[..., FakeCuda], code: int):
    raw = Raw(make_fake_cuda(fail=f"cuMemAlloc:1:{code}").library).start()
    stream = raw.stream()
    refused(code, raw.alloc, MIB)
    refused(code, raw.alloc, MIB)
    refused(code, raw.synchronize, stream)
    refused(code, raw.create, 2 * MIB)
    name = ctypes.c_char_p()
    raw.call("cuGetErrorName", code, ctypes.byref(name))
    assert name.value is not None
    assert name.value.startswith(b"CUDA_ERROR_")


def test_a_lost_context_drops_the_work_of_its_streams(fake_cuda: FakeCuda, raw: Raw):
    host, address, stream, event = Host(raw), raw.alloc(MIB), raw.stream(), raw.event()
    host.array[:] = 1
    raw.delay(stream, 30)
    raw.copy(address, host.address, MIB, stream)
    raw.record(event, stream)
    fake_cuda.arm("cuEventSynchronize", 1, 719, os.getpid())
    assert raw.code("cuEventSynchronize", ctypes.c_void_p(event)) == 719
    assert not fake_cuda.view(address, MIB).any()


def test_a_waiting_thread_learns_of_the_lost_context(fake_cuda: FakeCuda, raw: Raw):
    stream = raw.stream()
    raw.delay(stream, 30)
    context, codes = ctypes.c_void_p(), []
    raw.call("cuCtxGetCurrent", ctypes.byref(context))

    def wait() -> None:
        raw.call("cuCtxPushCurrent_v2", context)
        codes.append(raw.code("cuStreamSynchronize", ctypes.c_void_p(stream)))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: fake_cuda.calls("cuStreamSynchronize") == 1, "it waits")
    fake_cuda.arm("cuMemAlloc", 1, 719, os.getpid())
    refused(719, raw.alloc, MIB)
    thread.join()
    assert codes == [719]


def test_a_failing_batch_leaves_earlier_copies_in_flight(make_fake_cuda: Callable[..., FakeCuda]):
    fake = make_fake_cuda(fail="cuMemcpyBatchAsync:1:2")
    raw = Raw(fake.library).start()
    host, address, stream = Host(raw), raw.alloc(MIB), raw.stream()
    host.array[:] = 1
    assert raw.batch([(address + index, host.address, 1) for index in range(4)], ANY, stream) == 2
    raw.synchronize(stream)
    assert fake.view(address, 4).tolist() == [1, 1, 0, 0]


def test_another_process_can_be_made_to_fail_and_to_hang(fake_cuda: FakeCuda, peer: Peer):
    fake_cuda.arm("cuMemAlloc", 2, 2, peer.pid)
    peer.do("alloc", MIB)
    with pytest.raises(Failed, match=r"cuMemAlloc_v2: 2"):
        peer.do("alloc", MIB)
    fake_cuda.hang("cuMemAlloc", 1, peer.pid)
    peer.tell("alloc", MIB)
    until(lambda: fake_cuda.calls("cuMemAlloc", peer.pid) == 3, "it hangs in the call")
    assert fake_cuda.hbm_used() == MIB
    fake_cuda.lift(peer.pid)
    assert peer.answer()
    assert fake_cuda.hbm_used() == 2 * MIB


def test_a_hang_may_end_by_itself(fake_cuda: FakeCuda, make_peer):
    peer = make_peer(fake_cuda, hang="cuMemAlloc:1:5")
    assert peer.do("alloc", MIB)


def test_a_process_that_hangs_can_be_killed_and_blocks_nobody(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    fake_cuda.hang("cuMemAlloc", 0, peer.pid)
    peer.tell("alloc", MIB)
    until(lambda: fake_cuda.calls("cuMemAlloc", peer.pid) == 1, "it hangs")
    raw.alloc(MIB)
    peer.kill()
    until(lambda: peer.pid not in fake_cuda.processes(), "it is dead")


def test_a_stopped_process_blocks_nobody(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    peer.do("alloc", MIB)
    os.kill(peer.pid, signal.SIGSTOP)
    assert fake_cuda.hbm_used() == MIB
    raw.alloc(MIB)
    os.kill(peer.pid, signal.SIGCONT)


def test_a_forked_child_has_no_driver(raw: Raw):
    child = os.fork()
    if not child:
        os._exit(raw.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    raw.alloc(MIB)


def test_calls_are_counted_by_process(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    for _ in range(3):
        peer.do("alloc", MIB)
    raw.alloc(MIB)
    assert fake_cuda.calls("cuMemAlloc", peer.pid) == 3
    assert fake_cuda.calls("cuMemAlloc_v2") == 4
    peer.end()
    assert fake_cuda.calls("cuMemAlloc") == 4
    assert fake_cuda.processes() == [os.getpid()]


# --- versions and devices


@pytest.mark.parametrize(
    ("driver", "asked", "found"),
    [
        (13000, 13000, "cuMemcpyBatchAsync_v2"),
        (13000, 12080, "cuMemcpyBatchAsync"),
        (12080, 12080, "cuMemcpyBatchAsync"),
        (12080, 12070, None),
        (12040, 12040, None),
    ],
)
def test_functions_come_in_the_form_of_the_version(
    make_fake_cuda: Callable[..., FakeCuda], driver: int, asked: int, found: str | None
):
    raw = Raw(make_fake_cuda(version=driver).library)
    version = ctypes.c_int()
    raw.call("cuDriverGetVersion", ctypes.byref(version))
    assert version.value == driver
    address, status = ctypes.c_void_p(), ctypes.c_int()
    name, none = b"cuMemcpyBatchAsync", ctypes.c_uint64(0)
    answer = (ctypes.byref(address), asked, none, ctypes.byref(status))
    raw.call("cuGetProcAddress_v2", name, *answer)
    assert address.value == (ctypes.cast(raw.library[found], ctypes.c_void_p).value if found else None)
    assert (status.value == 0) == (found is not None)
    raw.call("cuGetProcAddress_v2", b"cuNoSuchThing", *answer)
    assert status.value == 1
    assert raw.code("cuGetProcAddress_v2", name, ctypes.byref(address), driver + 10, none, None) == 1


def test_an_old_driver_has_no_batches(make_fake_cuda: Callable[..., FakeCuda]):
    raw = Raw(make_fake_cuda(version=12040).library).start()
    host, address, stream = Host(raw), raw.alloc(MIB), raw.stream()
    assert raw.batch([(address, host.address, 1)], ANY, stream) == 801
    assert raw.batch([(address, host.address, 1)], ANY, stream, old=True) == 801


def test_visible_devices_move_ordinals_and_not_uuids(make_fake_cuda: Callable[..., FakeCuda], monkeypatch):
    fake = make_fake_cuda(devices=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{fake.device_name(0)}")
    raw = Raw(fake.library)
    raw.call("cuInit", 0)
    count, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    raw.call("cuDeviceGetCount", ctypes.byref(count))
    assert count.value == 2
    raw.call("cuDeviceGetUuid_v2", uuid, 0)
    assert uuid.raw.hex() == fake.device_name(2).removeprefix("GPU-").replace("-", "")
    assert raw.code("cuDeviceGetUuid_v2", uuid, 2) == 101


def test_without_a_folder_there_is_no_device():
    raw_code = "import ctypes, sys; it = ctypes.CDLL(sys.argv[1]); print(it.cuInit(0), it.cuCtxSynchronize())"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CUDA")}
    command = [sys.executable, "-c", raw_code, str(build())]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["100", "100"]


# --- the fake under load


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_threads_share_a_process_and_killed_processes_leave_no_lock(
    make_fake_cuda: Callable[..., FakeCuda], tmp_path: Path, sanitizer: str
):
    library = build(sanitizer)
    program = tmp_path / "stress"
    command = ["gcc", "-std=c17", "-O1", "-g", f"-fsanitize={sanitizer}", "-Wall", "-Wextra", "-Wpedantic"]
    command += ["-Werror", "-pthread", "-o", str(program), str(BIN / "stress.c"), str(library)]
    command += [f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True, timeout=120)
    fake = make_fake_cuda()
    for task in (["threads", "4"], ["processes", "60"]):
        done = subprocess.run(
            [program, *task],
            env=environment_of(fake),
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
