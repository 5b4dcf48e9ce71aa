"""The list of keys in an encrypted slab: with it, a later start knows which blocks its own keys can open.

It lies behind the header page, where a pool has its writer table, and holds no key: for each, a check value
that is derived from it. docs/design/disk.md is the contract.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_kernels import xxh3_64

from kvtierd.core.ids import PAGE_BYTES, TenantTag
from kvtierd.tiers.disk.keys import KEYS_MAX

MAGIC = b"KVTIERK1"
OFFSET = PAGE_BYTES
"""Where it begins in the slab."""
SLAB_ID_BYTES = 16
CHECK_BYTES = 16
_HEAD = struct.Struct(f"<8sQQ{SLAB_ID_BYTES}s{CHECK_BYTES}s")
_ENTRY = struct.Struct(f"<I{CHECK_BYTES}s")
_NO_CHECK = bytes(CHECK_BYTES)
BYTES_MAX = -(-(_HEAD.size + KEYS_MAX * _ENTRY.size) // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Which keys a slab's blocks are encrypted with."""

    slab_id: bytes
    """Chosen at random when the slab was made; every data key depends on it."""
    default: bytes | None
    """The check value of the default key, if there is one."""
    own: Mapping[TenantTag, bytes]
    """The check values of tenants' own keys."""

    def of(self, tenant: TenantTag) -> bytes | None:
        """The check value of the key that a tenant's blocks are encrypted with; None if it has none."""
        return self.own.get(tenant, self.default)

    def shares_a_key(self, other: "KeyTable") -> bool:
        """Whether blocks of any tenant can be opened with the keys of both."""
        tenants = self.own.keys() | other.own.keys()
        pairs = [(self.default, other.default), *((self.of(tag), other.of(tag)) for tag in tenants)]
        return any(mine is not None and mine == theirs for mine, theirs in pairs)

    def pack(self) -> bytes:
        """Whole pages."""
        entries = b"".join(_ENTRY.pack(tag, self.own[tag]) for tag in sorted(self.own))
        head = (self.slab_id, self.default or _NO_CHECK)
        covered = _HEAD.pack(MAGIC, 0, len(self.own), *head) + entries
        table = _HEAD.pack(MAGIC, xxh3_64(covered), len(self.own), *head) + entries
        return table.ljust(-(-len(table) // PAGE_BYTES) * PAGE_BYTES, b"\0")


def unpack(pages: bytes) -> KeyTable | None:
    """The list in these bytes; None if there is none that can be believed."""
    if len(pages) < _HEAD.size:
        return None
    magic, checksum, count, slab_id, default = _HEAD.unpack_from(pages)
    end = _HEAD.size + count * _ENTRY.size
    if magic != MAGIC or count > KEYS_MAX or end > len(pages):
        return None
    entries = pages[_HEAD.size : end]
    if xxh3_64(_HEAD.pack(magic, 0, count, slab_id, default) + entries) != checksum:
        return None
    own = {TenantTag(tag): check for tag, check in _ENTRY.iter_unpack(entries)}
    return KeyTable(slab_id, None if default == _NO_CHECK else default, own)
