"""One table from reason to status, complete and in step with the contract."""

import grpc
from kvtier.v1 import types_pb2
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.errors import status_of, to_error
from kvtierd.rpc.guard import Undecodable, decoder


def test_every_reason_has_a_status() -> None:
    statuses = {status_of(reason) for reason in Reason if reason is not Reason.UNSPECIFIED}
    assert grpc.StatusCode.OK not in statuses
    assert grpc.StatusCode.UNKNOWN not in statuses


def test_reasons_are_those_of_the_contract() -> None:
    on_the_wire = {name.removeprefix("REASON_"): number for name, number in types_pb2.Reason.items()}
    assert on_the_wire == {reason.name: int(reason) for reason in Reason}


def test_statuses_are_those_the_contract_promises() -> None:
    for reason in Reason:
        if 0 < reason < 30:
            assert status_of(reason) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(Reason.UNKNOWN_TOKEN) is grpc.StatusCode.UNAUTHENTICATED
    assert status_of(Reason.WRONG_EPOCH) is grpc.StatusCode.FAILED_PRECONDITION
    assert status_of(Reason.UNKNOWN_LEASE) is grpc.StatusCode.NOT_FOUND
    assert status_of(Reason.FOREIGN) is grpc.StatusCode.PERMISSION_DENIED
    assert status_of(Reason.SESSION_EXISTS) is grpc.StatusCode.ALREADY_EXISTS
    assert status_of(Reason.DRAINING) is grpc.StatusCode.UNAVAILABLE
    assert status_of(Reason.QUEUE_FULL) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(Reason.INTERNAL) is grpc.StatusCode.INTERNAL


def test_an_error_carries_all_that_the_refusal_says() -> None:
    error = to_error(Refusal(Reason.HASH_LENGTH, "wrong", field="hashes", value="x" * 500))
    assert (error.reason, error.field, error.message) == (types_pb2.REASON_HASH_LENGTH, "hashes", "wrong")
    assert len(error.value) == 120


def test_a_message_over_the_limit_is_not_even_parsed() -> None:
    decode = decoder(types_pb2.Error, 100)
    assert decode(types_pb2.Error(message="m" * 90).SerializeToString()).message == "m" * 90
    refused = decode(b"\xff" * 101)
    assert isinstance(refused, Undecodable)
    assert refused.refusal.reason is Reason.MALFORMED
    assert refused.refusal.value == "101 bytes"
    assert "100 bytes" in refused.refusal.message


def test_garbage_is_told_from_a_message() -> None:
    refused = decoder(types_pb2.Error, 100)(b"\xff\xff\xff")
    assert isinstance(refused, Undecodable)
    assert "kvtier.v1.Error" in refused.refusal.message
