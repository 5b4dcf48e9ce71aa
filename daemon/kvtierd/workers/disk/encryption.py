"""What makes a disk an encrypted one: its keys, those of its blocks that they can open, and its movers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.core.blocks.namespaces import tag_in
from kvtierd.core.ids import NamespaceDigest
from kvtierd.tiers.disk.key_table import OFFSET, KeyTable
from kvtierd.tiers.disk.keys import FIELD, KeyTroubleError, read_keys
from kvtierd.tiers.disk.slab import NAMING, Slab, refuse
from kvtierd.workers.disk.encrypted_moving import EncryptedMover
from kvtierd.workers.disk.keyring import Keyring, new_salt
from kvtierd.workers.disk.slot_cipher import Keyless, SlotCipher

OTHER_KEYS = "none of the keys is one that the slab was encrypted with"


class Encryption:
    """The keys of one slab, for one run of its worker."""

    def __init__(self, folder: Path) -> None:
        """Reads the keys. Raises Refusal."""
        self._folder = folder
        try:
            self._keys = read_keys(folder)
        except KeyTroubleError as error:
            raise refuse(FIELD, folder, str(error)) from error
        self._ring: Keyring | None = None

    def why_cold(self, slab: Slab) -> str:
        """Why no block of an encrypted slab can be kept; empty if some can. Raises OSError."""
        table = slab.key_table()
        if table is None:
            return "the slab's key table is damaged"
        return "" if table.shares_a_key(Keyring(self._keys, table.slab_id).table()) else OTHER_KEYS

    def new_table(self) -> bytes:
        """The key table of a slab that is made anew, as pages."""
        self._ring = Keyring(self._keys)
        return self._ring.table().pack()

    def forget_unreadable(self, slab: Slab, records: PoolRecords, image: memoryview) -> int:
        """Frees the blocks, in image and file, of tenants whose key is gone or another than before, and then
        notes in the slab the keys that there are now. If this is killed at any point, it can simply run
        again. Returns how many slots were freed. Raises OSError."""
        before, now = self._open(slab)
        if before == now:
            return 0
        found = records.scan()
        tenants = [tag_in(NamespaceDigest(row.tobytes())) for row in found["namespaces"]]
        same = {tag: before.of(tag) is not None and before.of(tag) == now.of(tag) for tag in set(tenants)}
        lost = found["slots"][np.array([not same[tag] for tag in tenants], bool)]
        if len(lost):
            records.free(lost)
            for extent in np.unique(slab.geometry.extent_of(lost)).tolist():
                offset, length = records.table_range(extent)
                slab.write(image[offset : offset + length], offset)
        slab.write(memoryview(now.pack()), OFFSET)
        return len(lost)

    def require_same(self, slab: Slab) -> None:
        """Raises Refusal for keys that have changed since the daemon's start, and OSError."""
        before, now = self._open(slab)
        if before != now:
            message = f"the keys in {self._folder} have changed since the daemon's start: restart it"
            raise refuse(FIELD, self._folder, message)

    def maker(self, disk: PoolRecords) -> Callable[..., EncryptedMover]:
        """Makes movers from the arguments of `Mover`, one for each thread, which share one salt."""
        assert self._ring is not None
        ring, salt, keyless = self._ring, new_salt(), Keyless()
        return lambda **arguments: EncryptedMover(SlotCipher(ring, salt, disk, keyless), **arguments)

    def _open(self, slab: Slab) -> tuple[KeyTable, KeyTable]:
        """The slab's key table, and that of our own keys."""
        found = slab.key_table()
        if found is None:
            message = f"the key table of {slab.path} is damaged. Restart the daemon, which makes it anew"
            raise refuse(NAMING.path, slab.path.parent, message)
        self._ring = Keyring(self._keys, found.slab_id)
        return found, self._ring.table()
