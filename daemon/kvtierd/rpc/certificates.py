"""TLS for the remote port: who calls, by its certificate; and the daemon's own certificate, which is
exchanged while it runs."""

import threading
from collections.abc import Mapping, Sequence

import grpc

from kvtierd.config.certificates import CertificateError, CertificateFiles, Certificates, FileState
from kvtierd.logs import logger

log = logger(__name__)


class RotatingCertificates:
    """Certificate, key and authorities, read again when their files change. New connections get what the
    files hold then; files that cannot be used change nothing, and are complained of once."""

    def __init__(self, files: CertificateFiles) -> None:
        """Reads the files. Raises CertificateError."""
        self._files = files
        self._lock = threading.Lock()
        found, self._seen = files.read()
        self._first = _configuration(found)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks for changes before each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # the types do not know that None means no change
            require_client_authentication=True,
        )

    def _changed(self) -> "grpc.ServerCertificateConfiguration | None":
        """What new connections are to use from now on; None if that has not changed. gRPC calls it on threads
        of its own."""
        with self._lock:
            if (now := self._files.states()) == self._seen:
                return None
            try:
                found, self._seen = self._files.read()
            except CertificateError as error:
                self._complain(now, error.field, str(error.path), str(error))
            except Exception as error:  # gRPC prints it and goes on, where nobody looks
                self._complain(now, "remote", "", f"cannot be read again: {error!r}")
            else:
                log.info("the remote port's certificates have been read again")
                return _configuration(found)
            return None

    def _complain(self, seen: tuple[FileState | None, ...], field: str, path: str, why: str) -> None:
        self._seen = seen
        log.warning(
            "the remote port goes on with the certificates that it has: a new file cannot be used",
            field=field,
            path=path,
            why=why,
        )


def _configuration(found: Certificates) -> "grpc.ServerCertificateConfiguration":
    return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.client_ca)


def names_in(auth_context: Mapping[str, Sequence[bytes]]) -> list[str]:
    """The names that a caller's certificate carries: the URIs and DNS names that it is for, or its common
    name if it has none of them. An authority that watches over the former may let anybody choose the
    latter."""
    names = [*auth_context.get("peer_uri", ()), *auth_context.get("peer_dns", ())]
    return [name.decode(errors="replace") for name in names or auth_context.get("x509_common_name", ())]
