"""Encrypts and decrypts the data of slots, and makes and checks what their records say about it.

The cipher is AES-256-GCM. A slot's record is authenticated with its data, and so is the data checksum, which
the record has only masked. docs/design/disk.md says what is derived from what.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from kvtier_kernels import PoolRecords, xxh3_64

from kvtierd.core.blocks.namespaces import tag_in
from kvtierd.core.ids import NamespaceDigest, TenantTag
from kvtierd.workers.disk.jobs import U32, U64
from kvtierd.workers.disk.keyring import DataKeys, Keyring
from kvtierd.workers.log import logger

TAG_BYTES = 16
DATA_KEYS_KEPT = 256
"""Data keys that a thread keeps: one for each tenant and each run of a worker whose blocks are read."""
_NONCE = 1
_NAMESPACE, _HASH, _WORLD, _SUM, _TAG = 3, 5, 10, 12, 14
"""Words of a record, as docs/design/pool.md has them."""
_AAD_WORDS = 13

Bytes = npt.NDArray[np.uint8]
Places = Sequence[tuple[int, int]]
"""Where the data of each slot begins in memory, and how many bytes they are."""

_log = logger(__name__)


class Keyless:
    """Says once for each tenant that its blocks are not written. For use from any thread."""

    def __init__(self) -> None:
        self._said: set[TenantTag] = set()
        self._lock = threading.Lock()

    def say(self, tenant: TenantTag) -> None:
        with self._lock:
            if tenant in self._said or len(self._said) > 1_000:
                return
            self._said.add(tenant)
        _log.warning(
            "blocks of a tenant are not written to the disk, because there is no key for it, and no default",
            tenant_tag=f"{tenant:08x}",
        )


class SlotCipher:
    """Encrypts and decrypts slots for one thread."""

    def __init__(self, ring: Keyring, salt: int, disk: PoolRecords, keyless: Keyless) -> None:
        """`salt` is that of this run of the worker."""
        self._ring = ring
        self._salt = salt
        self._disk = disk
        self._keyless = keyless
        self._kept: OrderedDict[tuple[TenantTag, int, int], DataKeys] = OrderedDict()

    def claim(self, slots: U32, generations: U64) -> tuple[npt.NDArray[np.bool_], U64]:
        """For WRITING slots: true where a slot may be encrypted now, because it never was with this
        generation, and its tenant has a key; and copies of the records, which name the salt from now on."""
        claimed = self._disk.claim(slots, generations, self._salt) == 1
        records = self._disk.copies(slots)
        claimed &= records[:, 0] >> np.uint64(24) == generations
        for row in np.flatnonzero(claimed).tolist():
            claimed[row] = self._keys(records[row], self._salt) is not None
        return claimed, records

    def encrypt(
        self, slots: U32, generations: U64, records: U64, sums: U64, plain: Bytes, at: Places,
        encrypted: Bytes, to: Sequence[int],
    ) -> tuple[U64, Bytes]:  # fmt: skip
        """Encrypts data of claimed slots, with these copies of their records and these checksums, from
        `plain` into `encrypted`, where each has room for a tag behind it. Returns what the records are to
        have: masked checksums, and tags of shape (n, 16)."""
        masked = np.empty(len(slots), np.uint64)
        tags = np.empty((len(slots), TAG_BYTES), np.uint8)
        nonces, about = _nonces(slots, generations), _authenticated(records, slots, generations, sums)
        source, target = plain.data, encrypted.data
        for row, ((begin, size), place) in enumerate(zip(at, to, strict=True)):
            keys, end = self._keys(records[row], self._salt), place + size
            assert keys is not None, "a slot without a key was claimed"
            keys.aead.encrypt_into(
                nonces[row], source[begin : begin + size], about[row], target[place : end + TAG_BYTES]
            )
            tags[row] = encrypted[end : end + TAG_BYTES]
            masked[row] = int(sums[row]) ^ keys.mask(nonces[row])
        return masked, tags

    def decrypt(
        self, slots: U32, generations: U64, records: U64, encrypted: Bytes, at: Places, plain: Bytes,
        to: Sequence[int],
    ) -> tuple[npt.NDArray[np.bool_], U64]:  # fmt: skip
        """Decrypts data of slots, with these copies of their READY records, from `encrypted`, where each has
        room for a tag behind it, into `plain`. Returns where they are exactly the bytes that were stored, and
        their checksums. Elsewhere, `plain` holds anything."""
        good = np.zeros(len(slots), bool)
        salts = records[:, _WORLD] >> np.uint64(16)
        nonces = _nonces(slots, generations)
        keys = [self._keys(record, int(salt)) for record, salt in zip(records, salts, strict=True)]
        masks = [0 if each is None else each.mask(nonce) for each, nonce in zip(keys, nonces, strict=True)]
        sums = records[:, _SUM] ^ np.array(masks, np.uint64)
        about = _authenticated(records, slots, generations, sums)
        tags = np.ascontiguousarray(records[:, _TAG : _TAG + 2]).view(np.uint8)
        source, target = encrypted.data, plain.data
        for row, ((begin, size), place) in enumerate(zip(at, to, strict=True)):
            key, end = keys[row], begin + size
            if key is None:
                continue
            encrypted[end : end + TAG_BYTES] = tags[row]
            opened = target[place : place + size]
            try:
                key.aead.decrypt_into(nonces[row], source[begin : end + TAG_BYTES], about[row], opened)
            except InvalidTag:
                continue
            # What the tag covers is what was read when the slot was written. Bytes that had changed by then,
            # since their checksum was computed, are found only by that.
            good[row] = xxh3_64(plain[place : place + size]) == sums[row]
        return good, sums

    def _keys(self, record: U64, salt: int) -> DataKeys | None:
        namespace = record[_NAMESPACE : _NAMESPACE + 2].tobytes()
        tenant = tag_in(NamespaceDigest(namespace))
        which = (tenant, int(record[_NONCE]), salt)
        keys = self._kept.get(which)
        if keys is not None:
            self._kept.move_to_end(which)
            return keys
        keys = self._ring.data_keys(*which)
        if keys is None:
            self._keyless.say(tenant)
            return None
        self._kept[which] = keys
        if len(self._kept) > DATA_KEYS_KEPT:
            self._kept.popitem(last=False)
        return keys


def _nonces(slots: U32, generations: U64) -> list[bytes]:
    """12 bytes for each slot: its number and its generation."""
    packed = np.empty(len(slots), [("slot", "<u4"), ("generation", "<u8")])
    packed["slot"], packed["generation"] = slots, generations
    return [each.tobytes() for each in packed]


def _authenticated(records: U64, slots: U32, generations: U64, sums: U64) -> list[bytes]:
    """What is authenticated with each slot's data: store id, namespace, hash, data bytes, group, shard, world
    size and salt of its record, its place in the slab, its generation, and its data's checksum."""
    words = np.empty((len(slots), _AAD_WORDS), "<u8")
    words[:, :10] = records[:, _NONCE : _WORLD + 1]
    words[:, 10], words[:, 11], words[:, 12] = slots, generations, sums
    return [row.tobytes() for row in words]
