"""Device memory between processes: handles, chunks, what a death leaves, and what is refused."""

import ctypes
import os
import tempfile
from collections.abc import Callable

import pytest

from tests.support.fake_cuda import FakeCuda
from tests.support.process import until
from tests.unit.fake_cuda.peer import Peer
from tests.unit.fake_cuda.raw import Failed, Raw
from tests.unit.fake_cuda.refusals import refused

MIB = 1 << 20
CHUNK = 2 * MIB
UID_OFFSET = 40
"""Where a handle of the fake driver says whose it is."""


def test_both_processes_see_the_same_bytes(raw: Raw, peer: Peer):
    address = peer.do("alloc", MIB)
    peer.do("write", address, b"from the engine")
    imported = raw.open(peer.do("export", address))
    assert raw.read(imported, 15) == b"from the engine"
    raw.write(imported, b"from the worker")
    assert peer.do("read", address, 15) == b"from the worker"


def test_opening_again_gives_the_same_address_until_closed_as_often(raw: Raw, peer: Peer):
    handle = peer.do("export", peer.do("alloc", MIB))
    imported = raw.open(handle)
    assert raw.open(handle) == imported
    raw.close(imported)
    raw.read(imported, 1)
    raw.close(imported)
    refused(1, raw.read, imported, 1)
    refused(1, raw.close, imported)


def test_a_handle_is_given_for_the_base_of_an_allocation_only(raw: Raw):
    address = raw.alloc(MIB)
    refused(1, raw.export, address + 4096)
    assert raw.export(address) == raw.export(address)


def test_an_open_import_keeps_the_memory_of_a_killed_exporter(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    address = peer.do("alloc", 64 * MIB)
    peer.do("write", address, b"still here")
    imported = raw.open(peer.do("export", address))
    peer.kill()
    until(lambda: fake_cuda.processes() == [os.getpid()], "the exporter is dead")
    assert fake_cuda.hbm_used() == 64 * MIB
    assert [one.exporter_pid for one in fake_cuda.open_imports()] == [peer.pid]
    assert raw.read(imported, 10) == b"still here"
    raw.close(imported)
    assert fake_cuda.hbm_used() == 0
    assert fake_cuda.open_imports() == []


def test_a_killed_importer_has_nothing_open_even_while_it_is_a_zombie(
    fake_cuda: FakeCuda, raw: Raw, peer: Peer
):
    address = raw.alloc(MIB)
    peer.do("open", raw.export(address))
    assert [(one.importer_pid, one.kind) for one in fake_cuda.open_imports()] == [(peer.pid, "legacy")]
    peer.kill()
    until(lambda: fake_cuda.open_imports() == [], "the import is closed")
    assert fake_cuda.hbm_used() == MIB


def test_memory_freed_while_imported_lives_on_for_the_importer(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    address = peer.do("alloc", MIB)
    handle = peer.do("export", address)
    imported = raw.open(handle)
    peer.do("free", address)
    assert fake_cuda.hbm_used() == MIB
    raw.read(imported, MIB)
    raw.close(imported)
    assert fake_cuda.hbm_used() == 0
    refused(205, raw.open, handle)


def test_a_new_allocation_at_the_old_address_has_the_old_handle_and_another_buffer_id(raw: Raw, peer: Peer):
    """As seen of driver 580: an importer that still holds the old one gets the old memory."""
    address = peer.do("alloc", MIB)
    handle, buffer_id = peer.do("export", address), peer.do("attribute", 7, address)
    imported = raw.open(handle)
    peer.do("free", address)
    assert peer.do("alloc", MIB) == address
    assert peer.do("export", address) == handle
    assert peer.do("attribute", 7, address) != buffer_id
    peer.do("write", address, b"new")
    assert raw.open(handle) == imported
    assert raw.read(imported, 3) != b"new"


def test_the_exporter_cannot_open_its_own_handle(raw: Raw):
    refused(201, raw.open, raw.export(raw.alloc(MIB)))


@pytest.mark.parametrize(
    ("settings", "exporter", "code"),
    [
        ({}, {"pid_namespace": 1}, 201),
        ({"ipc_namespaces": 205}, {"pid_namespace": 1}, 205),
        ({"ipc_namespaces": 0}, {"pid_namespace": 1}, 0),
        ({}, {"shown_pid": os.getpid()}, 201),
    ],
    ids=["another namespace", "as others say", "a driver that does not mind", "the same PID"],
)
def test_what_is_said_of_drivers_between_containers(
    make_fake_cuda: Callable[..., FakeCuda],
    make_peer: Callable[..., Peer],
    settings: dict[str, int],
    exporter: dict[str, int],
    code: int,
):
    fake = make_fake_cuda(**settings)
    raw, peer = Raw(fake.library).start(), make_peer(fake, **exporter)
    handle = peer.do("export", peer.do("alloc", MIB))
    if code:
        refused(code, raw.open, handle)
    else:
        raw.close(raw.open(handle))


def test_a_driver_may_mind_whose_memory_it_is(
    make_fake_cuda: Callable[..., FakeCuda], make_peer: Callable[..., Peer]
):
    fake = make_fake_cuda(ipc_users=1)
    raw, peer = Raw(fake.library).start(), make_peer(fake)
    handle = peer.do("export", peer.do("alloc", MIB))
    raw.close(raw.open(handle))
    others = bytearray(handle)
    others[UID_OFFSET : UID_OFFSET + 4] = (os.geteuid() + 1).to_bytes(4, "little")
    refused(205, raw.open, bytes(others))


@pytest.mark.parametrize("handle", [bytes(64), b"x" * 64])
def test_what_is_no_handle_is_refused(raw: Raw, handle: bytes):
    refused(1, raw.open, handle)


def test_the_handle_of_a_dead_process_is_refused(raw: Raw, peer: Peer):
    handle = peer.do("export", peer.do("alloc", MIB))
    peer.kill()
    peer.process.wait()
    refused(205, raw.open, handle)


def test_memory_of_another_device_is_refused(make_fake_cuda: Callable[..., FakeCuda], make_peer):
    fake = make_fake_cuda(devices=2)
    raw = Raw(fake.library).start(device=1)
    peer = make_peer(fake)
    refused(217, raw.open, peer.do("export", peer.do("alloc", MIB)))


def test_a_mig_slice_has_no_ipc_and_its_two_uuids_differ(make_fake_cuda: Callable[..., FakeCuda]):
    raw = Raw(make_fake_cuda(mig=1).library).start()
    refused(801, raw.export, raw.alloc(MIB))
    refused(801, raw.export_chunk, raw.create(CHUNK))
    one, two = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
    raw.call("cuDeviceGetUuid", one, 0)
    raw.call("cuDeviceGetUuid_v2", two, 0)
    assert one.raw != two.raw


@pytest.mark.parametrize(("setting", "code"), [(1, 801), (800, 800)])
def test_ipc_may_be_switched_off(make_fake_cuda: Callable[..., FakeCuda], setting: int, code: int):
    raw = Raw(make_fake_cuda(no_ipc=setting).library).start()
    refused(code, raw.export, raw.alloc(MIB))


# --- chunks


def test_chunks_mapped_side_by_side_are_shared_by_descriptor(raw: Raw, peer: Peer):
    ours = raw.reserve(2 * CHUNK)
    theirs = peer.do("reserve", 2 * CHUNK)
    for index in range(2):
        handle = raw.create(CHUNK)
        raw.map(ours + index * CHUNK, CHUNK, handle)
        descriptor = raw.export_chunk(handle)
        raw.release(handle)
        # Over there: from the descriptor's own number, which Linux lets any process of ours open.
        imported = peer.do("import_path", f"/proc/{os.getpid()}/fd/{descriptor}")
        os.close(descriptor)
        peer.do("map", theirs + index * CHUNK, CHUNK, imported)
        peer.do("release", imported)
    raw.allow(ours, 2 * CHUNK)
    peer.do("allow", theirs, 2 * CHUNK)
    raw.write(ours + CHUNK - 4, b"both sides")
    assert peer.do("read", theirs + CHUNK - 4, 10) == b"both sides"


def test_a_descriptor_outlives_the_exporter(fake_cuda: FakeCuda, raw: Raw, peer: Peer):
    address, handle = peer.do("mapped", CHUNK, CHUNK)
    peer.do("write", address, b"sent before death")
    descriptor = peer.do("export_chunk", handle)
    peer.kill()
    until(lambda: fake_cuda.hbm_used() == 0, "the exporter's memory is free")
    imported = raw.import_chunk(descriptor)
    os.close(descriptor)
    assert fake_cuda.hbm_used() == CHUNK
    ours = raw.reserve(CHUNK)
    raw.map(ours, CHUNK, imported)
    raw.allow(ours, CHUNK)
    assert raw.read(ours, 17) == b"sent before death"
    assert [(one.exporter_pid, one.kind) for one in fake_cuda.open_imports()] == [(peer.pid, "chunk")]
    raw.unmap(ours, CHUNK)
    raw.release(imported)
    raw.unreserve(ours, CHUNK)
    assert fake_cuda.hbm_used() == 0


def test_a_chunk_lives_as_long_as_a_handle_or_a_mapping(fake_cuda: FakeCuda, raw: Raw):
    address, handle = raw.mapped(CHUNK, CHUNK)
    raw.release(handle)
    assert fake_cuda.hbm_used() == CHUNK
    refused(1, raw.release, handle)
    raw.unmap(address, CHUNK)
    assert fake_cuda.hbm_used() == 0


def test_a_handle_can_be_had_back_from_an_address(raw: Raw):
    address, handle = raw.mapped(CHUNK, CHUNK)
    again = ctypes.c_uint64()
    raw.call("cuMemRetainAllocationHandle", ctypes.byref(again), ctypes.c_void_p(address + 5))
    assert again.value == handle
    raw.release(handle)
    raw.release(handle)


def test_chunks_are_not_legacy_and_say_how_they_can_be_exported(raw: Raw):
    address, _ = raw.mapped(CHUNK, CHUNK)
    assert raw.attribute(10, address) == 0
    assert raw.attribute(14, address) == 1
    refused(1, raw.export, address)
    refused(1, raw.export_chunk, raw.create(CHUNK, exportable=False))


def test_a_descriptor_that_is_no_chunk_is_refused(raw: Raw):
    with tempfile.TemporaryFile() as file:
        refused(1, raw.import_chunk, file.fileno())
        file.write(bytes(10_000))
        file.flush()
        refused(1, raw.import_chunk, file.fileno())
    reader, writer = os.pipe()
    refused(1, raw.import_chunk, reader)
    os.close(reader)
    os.close(writer)
    refused(1, raw.import_chunk, 9_999)


def test_mappings_are_whole_apart_and_inside_a_reservation(raw: Raw):
    address, _ = raw.mapped(2 * CHUNK, CHUNK)
    other = raw.create(CHUNK)
    refused(208, raw.map, address, CHUNK, other)
    refused(1, raw.map, address + 2 * CHUNK, CHUNK, other)
    refused(1, raw.unmap, address, 2 * CHUNK)
    refused(1, raw.unreserve, address, 2 * CHUNK)
    refused(1, raw.create, CHUNK - 1)


def test_a_mapping_without_access_cannot_be_copied(raw: Raw):
    address = raw.reserve(CHUNK)
    raw.map(address, CHUNK, raw.create(CHUNK))
    refused(1, raw.read, address, 1)
    raw.allow(address, CHUNK, flags=1)
    raw.read(address, 1)
    refused(1, raw.write, address, b"x")


# --- room


def test_device_memory_is_counted_over_all_processes(make_fake_cuda: Callable[..., FakeCuda], make_peer):
    fake = make_fake_cuda(hbm=64 * MIB, context_bytes=8 * MIB)
    raw = Raw(fake.library).start()
    peer = make_peer(fake)
    assert raw.memory_info() == (48 * MIB, 64 * MIB)
    peer.do("alloc", 40 * MIB)
    refused(2, raw.alloc, 9 * MIB)
    refused(2, raw.create, 10 * MIB)
    with pytest.raises(Failed) as failure:
        make_peer(fake, context_bytes=9 * MIB)
    assert failure.value.code == 2
    raw.alloc(8 * MIB)
    peer.kill()
    until(lambda: fake.hbm_used() == 8 * MIB, "the memory of the dead process is free")
    raw.alloc(40 * MIB)


def test_a_context_can_be_refused(make_fake_cuda: Callable[..., FakeCuda]):
    refused(2, Raw(make_fake_cuda(context_fail=1).library).start)


def test_closing_an_import_under_a_copy_loses_the_context(raw: Raw, peer: Peer):
    """The device would fault: fence, drain, and only then unmap."""
    imported = raw.open(peer.do("export", peer.do("alloc", MIB)))
    stream = raw.stream()
    raw.delay(stream, 30)
    raw.call("cuMemsetD8Async", *memset_arguments(imported, 1, 4096, stream))
    refused(700, raw.close, imported)
    refused(700, raw.synchronize, stream)
    refused(700, raw.alloc, MIB)


def memset_arguments(address: int, value: int, size: int, stream: int) -> tuple[object, ...]:
    return ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size), ctypes.c_void_p(stream)
