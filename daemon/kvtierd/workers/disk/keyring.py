"""Keys of encrypted disks, and what is derived from them. docs/design/disk.md says why this is sound."""

import os
import secrets
import struct

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtierd.core.ids import TenantTag
from kvtierd.tiers.disk.key_table import CHECK_BYTES, SLAB_ID_BYTES, KeyTable
from kvtierd.tiers.disk.keys import KEY_BYTES, KeySet

SALT_BITS = 48
CHECK_INFO = b"kvtier disk key check 1"
DATA_INFO = b"kvtier disk data keys 1"


def new_salt() -> int:
    """A random salt for one run of a worker, not 0."""
    return secrets.randbelow((1 << SALT_BITS) - 1) + 1


class DataKeys:
    """What the blocks of one tenant are encrypted with in one run of a worker."""

    def __init__(self, material: bytes) -> None:
        self.aead = AESGCM(material[:KEY_BYTES])
        # One block of this cipher for each nonce, so that this is counter mode.
        self._masks: CipherContext = Cipher(algorithms.AES(material[KEY_BYTES:]), modes.ECB()).encryptor()

    def mask(self, nonce: bytes) -> int:
        """64 bits that hide a block's data checksum: those of AES for a nonce of 12 bytes."""
        return int.from_bytes(self._masks.update(nonce + bytes(4))[:8], "little")


class Keyring:
    """The keys of one slab. Safe for several threads."""

    def __init__(self, keys: KeySet, slab_id: bytes | None = None) -> None:
        """Without `slab_id`, for a new slab."""
        self.slab_id = os.urandom(SLAB_ID_BYTES) if slab_id is None else slab_id
        self._keys = keys

    def table(self) -> KeyTable:
        """The check values of these keys."""
        default = None if self._keys.default is None else self._check(self._keys.default)
        return KeyTable(self.slab_id, default, {tag: self._check(key) for tag, key in self._keys.own.items()})

    def data_keys(self, tenant: TenantTag, boot_nonce: int, salt: int) -> DataKeys | None:
        """The data keys of a tenant for one boot of a daemon and one run of a worker; None if the tenant has
        no key."""
        key = self._keys.of(tenant)
        if key is None:
            return None
        about = self.slab_id + struct.pack("<QQ", boot_nonce, salt)
        info = DATA_INFO + struct.pack("<I", tenant)
        return DataKeys(HKDF(SHA256(), 2 * KEY_BYTES, about, info).derive(key))

    def _check(self, key: bytes) -> bytes:
        return HKDF(SHA256(), CHECK_BYTES, self.slab_id, CHECK_INFO).derive(key)
