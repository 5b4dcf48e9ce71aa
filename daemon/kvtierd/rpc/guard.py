"""Refuses messages that are too large or cannot be decoded, before anything looks into them.

gRPC itself would answer with a status that says little, and end a stream without a reason. So requests are
decoded here, up to a hard limit that is gRPC's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from kvtierd.core.errors import Reason, Refusal

HARD_LIMIT_FACTOR = 4
"""Messages larger than this many times the limit are refused by gRPC itself, with RESOURCE_EXHAUSTED."""


class Undecodable(NamedTuple):
    """What stands in for a request that could not be read."""

    refusal: Refusal


def decoder(message: type[Message], bytes_max: int) -> Callable[[bytes], Any]:
    """A gRPC deserialiser that returns the message, or `Undecodable`."""

    def refused(data: bytes, why: str) -> Undecodable:
        return Undecodable(Refusal(Reason.MALFORMED, why, field="message", value=f"{len(data)} bytes"))

    def decode(data: bytes) -> Message | Undecodable:
        if len(data) > bytes_max:
            return refused(
                data,
                f"a message has at most {bytes_max} bytes (Limits.message_bytes_max): split the call",
            )
        try:
            return message.FromString(data)
        except DecodeError:
            return refused(data, f"not a {message.DESCRIPTOR.full_name}: are both ends of one version?")

    return decode
