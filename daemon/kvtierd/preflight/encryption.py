"""Whether disks can be encrypted: the library for it, and the keys."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module

from kvtierd.preflight.findings import Finding, Situation, Verdict
from kvtierd.tiers.disk.keys import FIELD, KeyTroubleError, read_keys

NAME = "disk encryption"
LIBRARY = "cryptography 47 or later"
INSTALL = "install it where the daemon is (pip install 'cryptography>=47'), or leave the setting empty"


def check_keys(situation: Situation) -> Iterator[Finding]:
    """Checks the folder of disk.encryption_keys, if there is one, and that its keys can be used."""
    disk = situation.config.disk
    if disk.encryption_keys is None:
        if disk.paths:
            yield Finding(NAME, Verdict.OK, "off: disks hold blocks as they are")
        return
    failed = partial(Finding, NAME, Verdict.FAILURE, field=FIELD, value=disk.encryption_keys)
    if not has_library():
        yield failed(f"disks cannot be encrypted without {LIBRARY}", INSTALL)
    try:
        keys = read_keys(disk.encryption_keys)
    except KeyTroubleError as error:
        yield failed(error.found, error.remedy)
        return
    if not disk.paths:
        found = "there are keys for disks, and no disk"
        yield Finding(NAME, Verdict.WARNING, found, "name folders in disk.paths", FIELD, disk.encryption_keys)
        return
    own = f"{len(keys.own)} tenant{'' if len(keys.own) == 1 else 's'} with a key of their own, "
    others = "one key for the others" if keys.default else "blocks of the others are not written"
    told = f"{own}{others}" if keys.own else "one key for all tenants"
    yield Finding(NAME, Verdict.OK, f"AES-256-GCM, {told}")


def has_library() -> bool:
    """Whether the library is installed, and recent enough to encrypt without copies of its own."""
    try:
        aead = import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError:
        return False
    return hasattr(aead.AESGCM, "encrypt_into")
