"""Authorities and certificates that tests make, in files as an operator has them."""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "localhost"
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """Somebody who issues certificates. Two with the same name are not the same."""

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._sign(self._name, self._key, -1, 1, [], authority=True).certificate

    def issue(
        self,
        common_name: str,
        *,
        dns: tuple[str, ...] = (),
        uris: tuple[str, ...] = (),
        from_days: float = -1,
        to_days: float = 1,
    ) -> Issued:
        """A certificate with these names, valid between so many days from now."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in dns]
        names += [x509.UniformResourceIdentifier(each) for each in uris]
        return self._sign(subject, ec.generate_private_key(ec.SECP256R1()), from_days, to_days, names)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        from_days: float,
        to_days: float,
        names: list[x509.GeneralName],
        *,
        authority: bool = False,
    ) -> Issued:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + from_days * DAY)
            .not_valid_after(now + to_days * DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return Issued(
            signed.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )


class CertificateFolder:
    """The daemon's certificate, key and authorities, laid out as Kubernetes mounts a secret: links that lead
    through `..data`, which is exchanged at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions = 0
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(Path("..data") / name)

    def put(self, own: Issued, client_ca: bytes, *, key_mode: int = 0o600) -> None:
        self._versions += 1
        version = self.folder / f"..{self._versions}"
        version.mkdir()
        (version / "tls.crt").write_bytes(own.certificate)
        (version / "ca.crt").write_bytes(client_ca)
        (version / "tls.key").write_bytes(own.key)
        (version / "tls.key").chmod(key_mode)
        (self.folder / "..next").symlink_to(version.name)
        os.replace(self.folder / "..next", self.folder / "..data")

    @property
    def settings(self) -> dict[str, object]:
        """For `Daemon`."""
        names = {"certificate": "tls.crt", "key": "tls.key", "client_ca": "ca.crt"}
        return {f"remote__{setting}": self.folder / name for setting, name in names.items()}


def channel_to(port: int, trusted: bytes, own: Issued | None) -> grpc.Channel:
    """A connection of its own to a port of this host, as somebody with this certificate."""
    credentials = grpc.ssl_channel_credentials(
        trusted, own.key if own else None, own.certificate if own else None
    )
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.secure_channel(f"{HOST}:{port}", credentials, options)
