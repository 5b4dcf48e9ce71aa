"""Names for the integers and bytes that travel through the core, so that a signature says what it takes."""

from typing import NewType

import numpy as np
import numpy.typing as npt

SessionId = NewType("SessionId", int)
"""One attached process. Issued by the front, never reused within a boot."""

Epoch = NewType("Epoch", int)
"""One life of an engine instance: all its sessions share it, and it ends when any of them dies. Never the
same in two boots of the daemon."""

SpaceId = NewType("SpaceId", int)
"""One (namespace digest, group). Dense, issued by the core, never reused within a boot; u32 in the block
table."""

TransferNumber = NewType("TransferNumber", int)
"""One transfer of this boot; with the boot nonce it is unique for ever."""

PartId = NewType("PartId", int)
"""What one copy worker does of one transfer for one rank."""

Ticket = NewType("Ticket", int)
"""The submitter's own name of a transfer, strictly increasing within an epoch, below 2^56."""

LeaseId = NewType("LeaseId", int)
"""One lease of this boot; never used again within it."""
WorkerId = NewType("WorkerId", int)
"""One worker process, of a copy device or of a disk. A respawned worker gets a new id."""

RegistrationId = NewType("RegistrationId", int)
"""One rank's mapped memory, as its copy worker knows it."""

CheckId = NewType("CheckId", int)
"""One request to a copy worker to compare slots with their checksums."""

DiskId = NewType("DiskId", int)
"""One disk of the disk tier: its place in `disk.paths`, from 0."""

DiskJobId = NewType("DiskJobId", int)
"""One batch of slots that is written to, read from or checked on a disk. The number comes from the same count
as those of transfers, so that with the boot nonce it is a store id of its own."""

Rank = NewType("Rank", int)
"""One worker of an engine instance, from 0 to world size - 1."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""16 bytes: SHA-256 of the tenant, of the namespace's fields and of every rank's layout fingerprint,
shortened; then the tenant's tag."""

TenantTag = NewType("TenantTag", int)
"""A number of 32 bits that stands for a tenant where blocks are counted: its name, hashed."""

Fingerprint = NewType("Fingerprint", bytes)
"""16 bytes: SHA-256 of one rank's layout geometry, shortened."""

NO_TENANT = TenantTag(0)
"""Nobody's tag."""

Hashes = npt.NDArray[np.uint8]
"""Block hashes, shape (n, 32). Shorter hashes are padded with zeros; their namespace says how long they
really are."""

Entries = npt.NDArray[np.uint32]
"""Indexes into the block table; NO_ENTRY where there is none."""

Slots = npt.NDArray[np.uint32]
"""Page numbers (offset / PAGE_BYTES) of slots in the pool file, or in a disk's slab file. No slot is at page
0. Shape (n,) or (n, world).
"""

NO_ENTRY = 0xFFFF_FFFF
PAGE_BYTES = 4096
HASH_BYTES_MAX = 32
