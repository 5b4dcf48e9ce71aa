"""Fingerprints and digests, which are equal exactly if blocks may be shared."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtierd.core.ids import Fingerprint, NamespaceDigest, TenantTag
from kvtierd.core.stimuli import GroupGeometry

DIGEST_BYTES = 16
TAG_BYTES = 4
"""A namespace's digest ends with its tenant's tag, so that blocks of an earlier daemon count as their
tenant's. It begins otherwise, because people name a namespace by how its digest begins."""


@dataclass(frozen=True, slots=True)
class NamespaceAbout:
    """What a namespace's digest was made of."""

    tenant: str
    """As in `Owner.tenant`."""
    model: str
    fields: bytes
    """As in `AttachSession.namespace_fields`."""
    hash_bytes: int
    world_size: int
    fingerprints: tuple[Fingerprint, ...]
    """The layout of every rank, in rank order."""
    groups: tuple[GroupGeometry, ...]
    """The layout of rank 0."""


def tag_of(tenant: str) -> TenantTag:
    """The tag of a tenant. Two tenants may have the same one, if hardly ever; then they share what is
    guaranteed to them, and no blocks."""
    digest = hashlib.sha256(b"kvtier tenant 1\0" + tenant.encode()).digest()
    return TenantTag(int.from_bytes(digest[:TAG_BYTES], "big"))


def tag_in(digest: NamespaceDigest) -> TenantTag:
    """The tag of the tenant that a namespace belongs to."""
    return TenantTag(int.from_bytes(digest[-TAG_BYTES:], "big"))


def layout_fingerprint(groups: Sequence[GroupGeometry]) -> Fingerprint:
    """The fingerprint of one rank's layout. It covers every field of every group, in order."""
    digest = hashlib.sha256(b"kvtier layout 1\0")
    digest.update(struct.pack("<I", len(groups)))
    for group in groups:
        digest.update(
            struct.pack("<QQQI", group.kind, group.block_tokens, group.window_tokens, len(group.planes))
        )
        for fragment_bytes, description in group.planes:
            text = description.encode()
            digest.update(struct.pack("<QI", fragment_bytes, len(text)))
            digest.update(text)
        if group.replicated:
            digest.update(b"replicated\0")
    return Fingerprint(digest.digest()[:DIGEST_BYTES])


def fields_fingerprint(fields: bytes) -> bytes:
    """A short name for a namespace's fields. It is not for other eyes: a salt can be guessed from it."""
    return hashlib.sha256(b"kvtier fields 1\0" + fields).digest()[:DIGEST_BYTES]


def namespace_digest(
    tenant: str, fields: bytes, world_size: int, fingerprints: Sequence[Fingerprint]
) -> NamespaceDigest:
    """The digest of a namespace as one instance uses it; `tenant` is the instance's, and `fingerprints` has
    those of all its ranks, in rank order."""
    digest = hashlib.sha256(b"kvtier namespace 2\0")
    for part in (tenant.encode(), fields):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    digest.update(struct.pack("<I", world_size))
    for fingerprint in fingerprints:
        digest.update(fingerprint)
    tag = tag_of(tenant).to_bytes(TAG_BYTES, "big")
    return NamespaceDigest(digest.digest()[: DIGEST_BYTES - TAG_BYTES] + tag)
