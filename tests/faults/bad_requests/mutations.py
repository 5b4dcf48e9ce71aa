"""Protobuf messages damaged as bytes: bits flipped, cut, fields lost, doubled, swapped, of the wrong kind,
numbers out of range, lengths that lie. Some of what comes out is a right message still, only another one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
SIZES = {FIXED64: 8, FIXED32: 4}
ODD = (0, 1, 2, 7, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**56 - 1, 2**56, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass
class Field:
    """One field as it lies on the wire."""

    number: int
    kind: int
    value: int | bytes
    """Bytes for all kinds but VARINT."""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Value, and where it ends. ValueError."""
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("no varint")


def parse(data: bytes) -> list[Field]:
    """The fields of a message; ValueError if it is none."""
    fields, at = [], 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise ValueError("field 0")
        if kind == VARINT:
            value, at = read_varint(data, at)
            fields.append(Field(number, kind, value))
            continue
        if kind == BYTES:
            size, at = read_varint(data, at)
        elif kind in SIZES:
            size = SIZES[kind]
        else:
            raise ValueError(f"kind {kind}")
        if at + size > len(data):
            raise ValueError("beyond the end")
        fields.append(Field(number, kind, data[at : at + size]))
        at += size
    return fields


def assemble(fields: list[Field]) -> bytes:
    out = bytearray()
    for field in fields:
        out += varint(field.number << 3 | field.kind)
        if isinstance(field.value, int):
            out += varint(field.value)
        else:
            out += varint(len(field.value)) * (field.kind == BYTES) + field.value
    return bytes(out)


def flip(data: bytes, chance: Random) -> bytes:
    """Up to eight bits."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8)) if out else 0):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def cut(data: bytes, chance: Random) -> bytes:
    """A piece is missing, at the end or inside."""
    if not data:
        return b"\x08"
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:first] if chance.random() < 0.5 else data[:first] + data[last:]


def _damage_value(field: Field, chance: Random, depth: int) -> None:
    if isinstance(field.value, int):
        field.value = chance.choice((*ODD, field.value ^ 1 << chance.randrange(64), chance.getrandbits(64)))
        return
    dice = chance.random()
    if field.kind == BYTES and dice < 0.5 and depth < 4:
        field.value = mutate(field.value, chance, depth + 1)
    elif dice < 0.7:
        field.value = flip(field.value, chance)
    elif field.kind == BYTES:
        field.value = chance.choice(
            (
                b"",
                field.value[:-1],
                field.value * 2,
                field.value + b"\0",
                chance.randbytes(chance.randrange(64)),
            )
        )


def _damage_fields(data: bytes, chance: Random, depth: int) -> bytes:
    fields = parse(data)
    if not fields:
        return varint(chance.randrange(1, 40) << 3) + varint(chance.choice(ODD))
    index = chance.randrange(len(fields))
    field = fields[index]
    match chance.randrange(8):
        case 0:
            del fields[index]
        case 1:
            fields += [field] * chance.choice((1, 1, 2, 300))
        case 2:
            chance.shuffle(fields)
            fields.append(Field(chance.choice((1, 19, 1000, 2**29 - 1)), VARINT, chance.choice(ODD)))
        case 3:
            field.number = chance.choice(
                (field.number + 1, max(1, field.number - 1), chance.randrange(1, 16))
            )
        case 4 if isinstance(field.value, int):
            field.kind, field.value = BYTES, varint(field.value)
        case 4:
            field.kind, field.value = VARINT, chance.choice(ODD)
        case _:
            _damage_value(field, chance, depth)
    return assemble(fields)


def _lie(data: bytes, chance: Random) -> bytes:
    """Lengths, tags and groups that no encoder writes."""
    tail = chance.choice(
        (
            b"\x0a\xff\xff\xff\xff\x0f",  # four gigabytes follow
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\x00\x00",
            b"\x0b" * 200,  # groups that do not end
            b"\x0c",
            b"\x0f\x01",
            b"\x80" * 11,
            b"\x12" * 64,
            b"\xff" * 16,
        )
    )
    return tail + data if chance.random() < 0.5 else data + tail


def mutate(data: bytes, chance: Random, depth: int = 0) -> bytes:
    """Another message, or none."""
    dice = chance.random()
    if dice < 0.2:
        return flip(data, chance)
    if dice < 0.3:
        return cut(data, chance)
    if dice < 0.38:
        return _lie(data, chance)
    if dice < 0.4:
        return chance.randbytes(chance.randrange(200))
    try:
        return _damage_fields(data, chance, depth)
    except ValueError:  # it is no message: its length, or its bits
        return flip(data, chance)
