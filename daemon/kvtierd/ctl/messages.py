"""Messages of the contract as JSON, for programs."""

import json
from collections.abc import Iterable

from google.protobuf.message import Message

IDS = ("boot_nonce", "epoch")
"""Fields with numbers of up to 64 bits that are no amounts. They are texts in JSON, because JavaScript and jq
read numbers beyond 2**53 wrongly."""


def to_json_list(responses: Iterable[Message]) -> str:
    """A JSON list of messages, each as `to_json` writes it."""
    return json.dumps([as_plain(response) for response in responses], indent=2)


def to_json(response: Message) -> str:
    """One JSON object with every field of the contract, under its name there."""
    return json.dumps(as_plain(response), indent=2)


def as_plain(message: Message) -> dict[str, object]:
    """What `to_json` writes, as Python has it."""
    plain: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name) and not isinstance(value, Message):
            plain[field.name] = None
        elif isinstance(value, Message):
            plain[field.name] = as_plain(value)
        elif isinstance(value, (str, int, float)):
            plain[field.name] = str(value) if field.name in IDS else value
        else:
            plain[field.name] = [as_plain(item) if isinstance(item, Message) else item for item in value]
    return plain
