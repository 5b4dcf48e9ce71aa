"""What callers pass in and get back: layouts, hashes, addresses, buffers and errors, checked where they are
made."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path
from typing import Any

import grpc
import kvtier.v1.types_pb2 as types_pb2
import numpy as np
import pytest
from kvtier import (
    Group,
    GroupKind,
    KvtierError,
    Namespace,
    Reason,
    Role,
    SharedBuffer,
    default_socket,
    memory,
)
from kvtier.connection.address import Address, resolve
from kvtier.connection.rpc_errors import ERROR_METADATA, explain_rpc_error, from_rpc_error
from kvtier.connection.steps import BACKOFF_MOST_S, Backoff
from kvtier.layout import check_layout
from kvtier.queries import join_hashes, list_block_ids
from kvtier.spec import AttachSpec

from tests.unit.client.peer import BLOCK_BYTES, BLOCKS, NAMESPACE, group, plane

SIZE = BLOCKS * BLOCK_BYTES


def refused(call: object, *arguments: object, **options: object) -> KvtierError:
    with pytest.raises(KvtierError) as raised:
        call(*arguments, **options)  # type: ignore[operator]
    return raised.value


# --- layouts ---


def test_a_layout_that_fits_exactly_is_accepted() -> None:
    check_layout([group()], SIZE)


@pytest.mark.parametrize(
    ("bad", "reason", "field"),
    [
        (group(plane(base_offset=1)), Reason.PLANE_BEYOND_MAPPING, "groups[0].planes[0].base_offset"),
        (group(plane(), plane(base_offset=-1)), Reason.LAYOUT_INVALID, "groups[0].planes[1].base_offset"),
        (group(plane(fragment_bytes=0)), Reason.LAYOUT_INVALID, "groups[0].planes[0].fragment_bytes"),
        (
            group(plane(block_stride_bytes=BLOCK_BYTES - 1)),
            Reason.LAYOUT_INVALID,
            "groups[0].planes[0].block_stride_bytes",
        ),
        (
            group(plane(block_stride_bytes=2**62)),
            Reason.STRIDE_OVERFLOW,
            "groups[0].planes[0].block_stride_bytes",
        ),
        (group(num_blocks=0), Reason.LAYOUT_INVALID, "groups[0].num_blocks"),
        (group(num_blocks=2**32), Reason.LAYOUT_INVALID, "groups[0].num_blocks"),
        (group(plane(description="x" * 2000)), Reason.LAYOUT_INVALID, "groups[0].planes[0].description"),
        (
            Group(block_tokens=0, num_blocks=1, planes=(plane(),)),
            Reason.LAYOUT_INVALID,
            "groups[0].block_tokens",
        ),
        (Group(block_tokens=1, num_blocks=1, planes=()), Reason.LAYOUT_INVALID, "groups[0].planes"),
        (
            Group(block_tokens=1, num_blocks=1, planes=(plane(),), kind=GroupKind.SLIDING_WINDOW),
            Reason.LAYOUT_INVALID,
            "groups[0].window_tokens",
        ),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_by_field(bad: Group, reason: Reason, field: str) -> None:
    error = refused(check_layout, [bad], SIZE)
    assert (error.reason, error.field) == (reason, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "namespace.model"),
        ({"hash_scheme": ""}, "namespace.hash_scheme"),
        ({"hash_bytes": 7}, "namespace.hash_bytes"),
        ({"hash_bytes": 33}, "namespace.hash_bytes"),
        ({"tenant": "é" * 600}, "namespace.tenant"),
        ({"generation": -1}, "namespace.generation"),
        ({"identity": (("b", ""), ("a", ""))}, "namespace.identity"),
        ({"identity": (("a", ""), ("a", ""))}, "namespace.identity"),
        ({"identity": (("", ""),)}, "namespace.identity"),
        ({"identity": (("n" * 129, ""),)}, "namespace.identity"),
        ({"identity": (("a", "v" * 1_025),)}, "namespace.identity[a]"),
        ({"identity": tuple((f"{number:03}", "") for number in range(257))}, "namespace.identity"),
        ({"identity": tuple((f"{number:03}", "x" * 1_000) for number in range(40))}, "namespace.identity"),
    ],
)
def test_a_namespace_that_makes_no_sense_is_refused_by_field(change: dict[str, object], field: str) -> None:
    fields: dict[str, object] = {"model": "m", "kv_dtype": "d", "hash_scheme": "s"} | change
    error = refused(Namespace, **fields)
    assert (error.reason, error.field) == (Reason.NAMESPACE_INVALID, field)


def test_a_daemon_that_knows_no_identity_keeps_apart_what_differs_in_it() -> None:
    def revision(*identity: tuple[str, str]) -> str:
        namespace = Namespace(
            model="m", kv_dtype="d", hash_scheme="s", weights_revision="r", identity=identity
        )
        return namespace.to_proto().weights_revision

    seen = {
        revision(),
        revision(("a", "1")),
        revision(("a", "2")),
        revision(("a 1 1", "")),
        revision(("b", "1")),
    }
    assert len(seen) == 5
    assert revision() == "r"
    assert all(one.startswith("r") for one in seen)


def test_every_field_of_the_wire_namespace_can_be_said() -> None:
    wire = {field.name for field in types_pb2.Namespace.DESCRIPTOR.fields}
    assert wire == set(Namespace.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"instance": ""}, "instance"),
        ({"world_size": 0, "role": Role.SCHEDULER}, "world_size"),
        ({"world_size": 2}, "world_size"),
        ({"world_size": 2, "rank": 2, "role": Role.RANK}, "rank"),
        ({"role": Role.SCHEDULER}, "groups"),
        ({"memory": None}, "memory"),
        ({"groups": ()}, "groups"),
        ({"program": "x" * 2000}, "program"),
        ({"configuration": (("b", ""), ("a", ""))}, "configuration"),
        ({"prefill_tokens_per_s": -1.0}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": math.nan}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": math.inf}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": 1e-4}, "prefill_tokens_per_s"),
    ],
)
def test_a_client_that_makes_no_sense_is_refused_by_field(options: dict[str, object], field: str) -> None:
    with SharedBuffer.create(SIZE) as memory:
        given: dict[str, object] = {
            "instance": "i",
            "namespace": NAMESPACE,
            "groups": (group(),),
            "memory": memory,
        }
        assert refused(AttachSpec, **given | options).field == field


# --- buffers ---


def test_a_buffer_cannot_change_its_size() -> None:
    with SharedBuffer.create(8192) as buffer:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.fileno(), size)
        assert fcntl.fcntl(buffer.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        buffer.array[:] = 7
        assert os.pread(buffer.fileno(), 1, 8191) == b"\7"


def test_a_view_of_a_closed_buffer_stays_readable() -> None:
    buffer = SharedBuffer.create(4096)
    view = buffer.array[:10]
    view[:] = 3
    buffer.close()
    buffer.close()
    assert view.sum() == 30
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.array


def test_whoever_makes_a_buffer_pays_for_all_of_it_at_once() -> None:
    with SharedBuffer.create(5 * 4096 + 1) as buffer:
        assert buffer.held_bytes == 6 * 4096
        assert not buffer.array.any()
    with SharedBuffer.create(1 << 40, sparse=True) as buffer:
        assert buffer.held_bytes == 0
        buffer.populate(4095, 2)
        assert buffer.held_bytes == 2 * 4096
        buffer.array[4095] = 7
        buffer.populate(0, 8192)
        assert buffer.array[4095] == 7
        buffer.discard(0, 8192)
        assert buffer.held_bytes == 0


def test_a_buffer_without_memory_says_how_much_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", -1)  # the system refuses
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"size_bytes=8192: no memory for so many bytes.*share less"):
        SharedBuffer.create(8192)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_an_empty_buffer_is_refused() -> None:
    assert refused(SharedBuffer.create, 0).field == "size_bytes"


# --- hashes and block ids ---


def test_hashes_travel_one_after_another_whatever_they_come_as() -> None:
    array = np.arange(64, dtype=np.uint8).reshape(2, 32)
    joined = array.tobytes()
    for form in (joined, [joined[:32], joined[32:]], array, np.asfortranarray(array)):
        assert join_hashes(form, 32) == joined


@pytest.mark.parametrize(
    "bad", [b"x" * 31, [b"x" * 32, b"y"], np.zeros((2, 31), np.uint8), np.zeros((2, 32))]
)
def test_hashes_of_another_length_are_refused(bad: object) -> None:
    assert refused(join_hashes, bad, 32).reason is Reason.HASH_LENGTH


def test_block_ids_may_be_any_sequence_of_integers() -> None:
    for form in ([3, 1], (3, 1), np.array([3, 1], np.uint32), range(3, 0, -2)):
        assert list_block_ids(form, 4, distinct=True) == [3, 1]
    assert refused(list_block_ids, [0, 4], 4, distinct=False).field == "block_ids[1]"
    assert refused(list_block_ids, [2, 1, 2], 4, distinct=True).field == "block_ids[2]"
    assert list_block_ids([2, 2], 4, distinct=False) == [2, 2]


# --- where the daemon is ---


def test_the_socket_is_found_where_the_daemon_puts_it() -> None:
    assert default_socket({"KVTIER_SOCKET": "/a/b.sock"}) == Path("/a/b.sock")
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/kvtier/kvtierd.sock")
    assert default_socket({"XDG_RUNTIME_DIR": "relative"}, uid=7) == Path("/tmp/kvtier-7/kvtierd.sock")
    assert default_socket({}, uid=7) == Path("/tmp/kvtier-7/kvtierd.sock")


def test_the_side_socket_is_beside_it() -> None:
    address = Address(Path("/run/k/kvtierd.sock"))
    assert address.side_socket == Path("/run/k/kvtierd.side.sock")
    assert address.target == "unix:/run/k/kvtierd.sock"
    assert resolve("unix:/x/y.sock") == resolve("/x/y.sock") == resolve(Path("/x/y.sock"))


# --- errors ---


def test_reasons_are_those_of_the_contract() -> None:
    wire = {value.name.removeprefix("REASON_"): value.number for value in types_pb2.Reason.DESCRIPTOR.values}
    assert {reason.name: reason.value for reason in Reason} == wire


def test_an_error_names_reason_field_value_and_what_to_do() -> None:
    error = KvtierError.from_proto(
        types_pb2.Error(
            reason=types_pb2.REASON_BLOCK_ID_RANGE, field="block_ids[3]", value="99", message="below 64"
        )
    )
    assert str(error) == "BLOCK_ID_RANGE: below 64 [block_ids[3]=99]"
    later = KvtierError.from_proto(types_pb2.Error(reason=types_pb2.Reason.ValueType(1234), message="new"))
    assert later.reason is Reason.UNSPECIFIED
    assert "1234" in str(later)


class FailedCall(grpc.RpcError):
    def __init__(self, *metadata: tuple[str, bytes]) -> None:
        self._metadata = metadata

    def trailing_metadata(self) -> Any:
        return self._metadata

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "gone"


def test_the_structured_error_of_a_refused_call_is_read_and_nonsense_is_not() -> None:
    detail = types_pb2.Error(reason=types_pb2.REASON_DRAINING, message="later").SerializeToString()
    error = from_rpc_error(FailedCall(("other-bin", b"x"), (ERROR_METADATA, detail)))
    assert error is not None
    assert error.reason is Reason.DRAINING
    assert from_rpc_error(FailedCall((ERROR_METADATA, b"\xff\xff"))) is None
    assert explain_rpc_error(FailedCall()) == "UNAVAILABLE: gone"


# --- backoff ---


def test_backoff_doubles_up_to_its_bound_and_starts_anew() -> None:
    backoff = Backoff(lambda least, most: most)
    waits = [backoff.next_s() for _ in range(8)]
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert waits[-1] == BACKOFF_MOST_S
    backoff.reset()
    assert backoff.next_s() == 0.05


def test_backoff_is_spread_between_half_and_whole() -> None:
    backoff = Backoff()
    for most in (0.05, 0.1, 0.2, 0.4):
        assert most / 2 <= backoff.next_s() <= most
