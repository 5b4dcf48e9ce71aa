"""The folder with the keys of encrypted disks: which tenants its files are for, and whether only the daemon
can read them.

A file holds one key, written as 64 hexadecimal digits. Its name says whose it is: `default` for every tenant
without a key of its own, otherwise the tenant's name, in which %, / and a dot at the beginning are written as
%25, %2F and %2E, and a tenant whose name is `default` as %64efault. Hidden files are passed over.
"""

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes

from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.ids import TenantTag

FIELD = "disk.encryption_keys"
DEFAULT_NAME = "default"
KEY_BYTES = 32
KEYS_MAX = 4_096
"""Keys that a folder may hold."""
MAKE = "make one with: openssl rand -hex 32"
_HEX = re.compile(rb"[0-9a-fA-F]{64}\n?")
_ESCAPED = re.compile(r"(?:[^%]|%[0-9a-fA-F]{2})+")


class KeyTroubleError(Exception):
    """Why the keys cannot be used. The text names the path, what is wrong, and what to do."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}; {remedy}")
        self.found = found
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys of a folder."""

    default: bytes | None = field(repr=False)
    """That of tenants without one of their own, if there is one."""
    own: Mapping[TenantTag, bytes] = field(repr=False)

    def of(self, tenant: TenantTag) -> bytes | None:
        """The key for a tenant's blocks; None if there is none, so that they must not be written."""
        return self.own.get(tenant, self.default)

    @property
    def writable(self) -> frozenset[TenantTag] | None:
        """The tenants that have a key; None for all."""
        return None if self.default is not None else frozenset(self.own)


def read_keys(folder: Path) -> KeySet:
    """Reads all keys. Raises KeyTroubleError if the folder or one of its files cannot be used, or somebody
    else may read it."""
    try:
        _require_private(folder, folder.stat(), "folder", "700")
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise _failed(folder, error, f"create it: install -d -m 0700 {folder}") from error
    if not names:
        advice = f"openssl rand -hex 32 > {folder}/{DEFAULT_NAME}; chmod 400 {folder}/{DEFAULT_NAME}"
        raise KeyTroubleError(f"there is no key in {folder}", f"make one for all tenants: {advice}")
    if len(names) > KEYS_MAX:
        raise KeyTroubleError(f"{folder} holds {len(names)} files", f"at most {KEYS_MAX} keys can be used")
    default: bytes | None = None
    own: dict[TenantTag, bytes] = {}
    by_tag: dict[TenantTag, str] = {}
    for name in names:
        key = _read_key(folder / name)
        if name == DEFAULT_NAME:
            default = key
            continue
        tag = tag_of(tenant_of_file(folder / name))
        if tag in by_tag:
            raise KeyTroubleError(
                f"{folder / name} and {folder / by_tag[tag]} are for tenants that cannot be told apart",
                "remove one, or give its tenant another name",
            )
        by_tag[tag], own[tag] = name, key
    return KeySet(default, own)


def tenant_of_file(path: Path) -> str:
    """The tenant whose key a file holds. Raises KeyTroubleError for a name that stands for none."""
    try:
        if not _ESCAPED.fullmatch(path.name):
            raise ValueError
        return unquote_to_bytes(path.name).decode()
    except ValueError:
        raise KeyTroubleError(
            f"the name of {path} stands for no tenant", "write a % in a tenant's name as %25, and / as %2F"
        ) from None


def file_of_tenant(tenant: str) -> str:
    """The name of the file for a tenant's key."""
    name = tenant.replace("%", "%25").replace("/", "%2F")
    if name == DEFAULT_NAME or name.startswith("."):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name


def _read_key(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise KeyTroubleError(f"{path} is a symbolic link", "copy the key itself there") from error
        raise _failed(path, error, f"let the daemon's user read it: chown {os.geteuid()} {path}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise KeyTroubleError(f"{path} is not a regular file", "keep nothing but keys there")
        _require_private(path, found, "file", "400")
        written = os.read(fd, 128)
    except OSError as error:
        raise _failed(path, error, "look at it as the daemon's user") from error
    finally:
        os.close(fd)
    if not _HEX.fullmatch(written):
        raise KeyTroubleError(f"{path} holds no key, which is written as 64 hexadecimal digits", MAKE)
    return bytes.fromhex(written.decode())


def _require_private(path: Path, found: os.stat_result, what: str, mode: str) -> None:
    if what == "folder" and not stat.S_ISDIR(found.st_mode):
        raise KeyTroubleError(f"{path} is not a folder", "name the folder that holds the keys")
    if found.st_uid not in (0, os.geteuid()):
        raise KeyTroubleError(
            f"the {what} {path} belongs to uid {found.st_uid}, this daemon runs as {os.geteuid()}",
            f"chown {os.geteuid()} {path}",
        )
    if found.st_mode & 0o077:
        raise KeyTroubleError(
            f"the {what} {path} has mode {stat.S_IMODE(found.st_mode):04o}: others may use it",
            f"chmod {mode} {path}, and make new keys if others have read them",
        )


def _failed(path: Path, error: OSError, remedy: str) -> KeyTroubleError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return KeyTroubleError(f"looking at {path} failed with {name} ({error.strerror})", remedy)
