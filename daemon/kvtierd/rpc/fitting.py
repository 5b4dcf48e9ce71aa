"""Long answers to operators: they fit a message, and making them does not hold up the engines' calls."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

ANSWER_BYTES_MAX = 2 << 20
"""Nothing is added to an answer that has so many bytes. By default, gRPC takes messages of 4 MiB."""

_Item = TypeVar("_Item")
_Message = TypeVar("_Message", bound=Message)


async def as_many_as_fit(items: Iterable[_Item], make: Callable[[_Item], _Message]) -> list[_Message]:
    """The messages of the first of the items, as many as fit one answer. The event loop runs between two of
    them, so items must not be views of what may change."""
    messages: list[_Message] = []
    room_bytes = ANSWER_BYTES_MAX
    for item in items:
        if room_bytes <= 0:
            break
        message = make(item)
        messages.append(message)
        room_bytes -= message.ByteSize()
        await asyncio.sleep(0)
    return messages
