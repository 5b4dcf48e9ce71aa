"""The certificate, the key and the authorities of the remote port: read from their files, and checked before
they are used, at the start and whenever the files change."""

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES_MAX = 1 << 20
READS_MAX = 3
"""How often files that change while they are read are read again."""
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"

FileState = tuple[int, int, int, int, int]
"""What changes when a file does: device, inode, size, and the times of its bytes and of its mode."""


class CertificateError(Exception):
    """A file that cannot be used. The text says why, and what to do."""

    def __init__(self, field: str, path: Path, message: str) -> None:
        super().__init__(message)
        self.field = field
        """The setting that names the file."""
        self.path = path


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files hold, in PEM."""

    certificate: bytes
    """The daemon's own, with what is between it and its authority."""
    key: bytes
    client_ca: bytes


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the files are. Each may be a link that somebody turns, as Kubernetes does."""

    certificate: Path
    key: Path
    client_ca: Path

    def states(self) -> tuple[FileState | None, ...]:
        """What the files are like now; None for one that cannot be looked at. It differs once a file has
        changed."""
        return tuple(map(_state, (self.certificate, self.key, self.client_ca)))

    def read(self) -> tuple[Certificates, tuple[FileState | None, ...]]:
        """The files' contents, and the state in which they were read. Raises CertificateError unless they can
        be used together."""
        for _ in range(READS_MAX):
            before = self.states()
            found = Certificates(
                _read("remote.certificate", self.certificate),
                _read("remote.key", self.key, secret=True),
                _read("remote.client_ca", self.client_ca),
            )
            if self.states() == before:
                break
        self._check(found)
        return found, before

    def _check(self, found: Certificates) -> None:
        if _CERTIFICATE not in found.certificate:
            raise _not_pem("remote.certificate", self.certificate, "certificate")
        if _KEY not in found.key:
            raise _not_pem("remote.key", self.key, "private key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        chain, key = _in_memory(found.certificate), _in_memory(found.key)
        try:
            # The text stands for a password that nobody has given, so that none is asked for.
            context.load_cert_chain(f"/proc/self/fd/{chain}", f"/proc/self/fd/{key}", password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"does not belong to {self.certificate}: name the two that were made together"
                raise CertificateError("remote.key", self.key, why) from None
            why = (
                f"cannot be used with {self.key} ({error.reason or error}): write both as PEM, the key "
                "without a password"
            )
            raise CertificateError("remote.certificate", self.certificate, why) from None
        finally:
            os.close(chain)
            os.close(key)
        try:
            context.load_verify_locations(cadata=found.client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise _not_pem("remote.client_ca", self.client_ca, "certificate") from None


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(field: str, path: Path, *, secret: bool = False) -> bytes:
    try:
        # A pipe in place of a file would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = f"cannot be read ({error.strerror}): name a file that the daemon's user may read"
        raise CertificateError(field, path, why) from None
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CertificateError(field, path, "is no file: name a file in PEM")
        if secret and (why := _exposed(about)):
            raise CertificateError(field, path, why)
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise CertificateError(field, path, "has more than 1 MiB: name a file in PEM")
    return data


def _exposed(about: os.stat_result) -> str:
    """Why a key is not secret, and what to do; empty if it is. Where the daemon is not root, its group may
    read a key of root's: so are the secrets that Kubernetes mounts."""
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {about.st_uid}: chown it to the daemon's user ({os.geteuid()}) or to root"
    allowed = 0o740 if about.st_uid == 0 != os.geteuid() else 0o700
    if mode & 0o777 & ~allowed:
        return f"may be read or written by others (mode {mode:04o}): chmod {allowed & 0o640:04o}"
    return ""


def _in_memory(data: bytes) -> int:
    """A descriptor of a file that has these bytes and no name, because Python's ssl only reads files."""
    descriptor = os.memfd_create("kvtier-certificate", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def _not_pem(field: str, path: Path, what: str) -> CertificateError:
    return CertificateError(field, path, f"holds no {what} in PEM: name a file that does")
