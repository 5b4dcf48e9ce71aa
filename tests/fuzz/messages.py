"""Changes protobuf messages field by field, by what their descriptors say."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.source import Source

EDITS_MAX = 12
REPEATS_MAX = 80
DEPTH_MAX = 5
_SIZES = {
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_ENUM: (32, True),
}
_FLOATS = (0.0, -1.0, 1.0, 1e-300, 1e9, 1e300, float("inf"), float("-inf"), float("nan"), 25_000.0)


def edited(message: Message, source: Source) -> None:
    """Makes up to `EDITS_MAX` changes, anywhere in the message."""
    for _ in range(source.below(EDITS_MAX)):
        edit(message, source)


def edit(message: Message, source: Source, depth: int = 0) -> None:
    """Makes one change."""
    fields = message.DESCRIPTOR.fields
    field = fields[source.below(len(fields))] if fields else None
    if field is None:
        return
    if field.is_repeated:
        _edit_repeated(message, field, source, depth)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if source.one_in(16):
            message.ClearField(field.name)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if depth < DEPTH_MAX:
                edit(inner, source, depth + 1)
    else:
        setattr(message, field.name, _value(field, source))


def _edit_repeated(message: Message, field: Any, source: Source, depth: int) -> None:
    values = getattr(message, field.name)
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    kind = source.below(8)
    if kind <= 2 and values:
        index = source.below(len(values))
        if not is_message:
            values[index] = _value(field, source)
        elif depth < DEPTH_MAX:
            edit(values[index], source, depth + 1)
    elif kind == 3 and values:
        del values[source.below(len(values))]
    elif kind == 4 and values:
        copies = [values[source.below(len(values))]] * source.below(REPEATS_MAX)
        values.extend(copies)
    elif kind == 5:
        del values[:]
    elif is_message:
        new = values.add()
        for _ in range(source.below(4) if depth < DEPTH_MAX else 0):
            edit(new, source, depth + 1)
    else:
        values.append(_value(field, source))


def _value(field: Any, source: Source) -> Any:
    if field.cpp_type in _SIZES:
        bits, is_signed = _SIZES[field.cpp_type]
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM and not source.one_in(4):
            return source.choice([value.number for value in field.enum_type.values])
        value = source.hostile() % (1 << bits)
        return value - (1 << bits) if is_signed and value >> (bits - 1) else value
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return source.flag()
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.text()
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return source.choice(_FLOATS)
    return _bytes(source)


def _bytes(source: Source) -> bytes:
    kind = source.below(3)
    if kind == 0:
        return source.take(source.below(64))
    if kind == 1:  # hashes and slots that are known by their first byte
        width, count = source.choice((32, 8, 4, 1)), source.below(16)
        return b"".join(source.number().to_bytes(width, "little") for _ in range(count))
    return bytes(source.choice((0, 1, 31, 32, 33, 64, 1024, 1025, 4096, 70_000)))
