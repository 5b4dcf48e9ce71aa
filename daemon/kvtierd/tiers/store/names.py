"""The names of packs, and of the notes that a collector leaves in the place of packs: a note names the packs
that have the blocks now."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

MOVED_TO_MAX: Final = 64
BEGIN_BYTES: Final = 8
"""Of each block's hash, in a note. If two blocks begin alike, one pack more is looked at."""
NOTE_BYTES_MAX: Final = 2 << 20
_PACK: Final = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9a-f]{8}\.pack")
_PACK_SUFFIX: Final = ".pack"
_NOTE_SUFFIX: Final = ".moved"


def is_pack(name: str) -> bool:
    """Whether that is the name of a pack, without its folder."""
    return _PACK.fullmatch(name) is not None


def made_s(pack: str) -> float:
    """When a pack was made, by its host's clock: seconds since 1970."""
    return int(pack[:20]) / 1e6


def note_name(pack: str) -> str:
    """The name of the note for a pack. It follows the pack in a listing."""
    return pack.removesuffix(_PACK_SUFFIX) + _NOTE_SUFFIX


def pack_of_note(name: str) -> str:
    """The name of the pack that a note is for; empty if that is no note's name."""
    pack = name.removesuffix(_NOTE_SUFFIX) + _PACK_SUFFIX
    return pack if name.endswith(_NOTE_SUFFIX) and is_pack(pack) else ""


def note_of(moved_to: Mapping[str, Iterable[bytes]]) -> bytes:
    """What a note has that says which blocks these packs have: MOVED_TO_MAX packs at most."""
    begins = {
        name: b"".join(sorted(block[:BEGIN_BYTES] for block in blocks)).hex()
        for name, blocks in moved_to.items()
    }
    return json.dumps({"moved_to": begins}).encode()


def read_note(note: bytes) -> dict[str, set[bytes]]:
    """The packs that a note names, and how the hashes of the blocks begin that each of them has; nothing if
    it is no note. Whoever reads the packs believes nothing but what their own heads say."""
    try:
        found = list(json.loads(note)["moved_to"].items())[:MOVED_TO_MAX]
        return {name: _begins(bytes.fromhex(begins)) for name, begins in found if is_pack(name)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _begins(joined: bytes) -> set[bytes]:
    return {joined[at : at + BEGIN_BYTES] for at in range(0, len(joined), BEGIN_BYTES)}
