"""The settings of the port for routers and schedulers on other hosts."""

from dataclasses import dataclass
from pathlib import Path

from kvtierd.config import settings as s
from kvtierd.config.certificates import CertificateFiles
from kvtierd.config.disk import Refuse

FILES = ("certificate", "key", "client_ca")


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """What routers and schedulers on other hosts may read, by TCP with mutual TLS. No block travels there."""

    listen: str = s.setting(
        "off",
        s.address,
        "Where they find it; off: nowhere. Who sees what follows from the rules cert:NAME=TENANT of "
        "server.tenants.",
    )
    certificate: Path | None = s.setting(
        None,
        s.path,
        "PEM file with the daemon's certificate, and those between it and its authority. This file and the "
        "next two are read again when they change, without a restart.",
    )
    key: Path | None = s.setting(
        None, s.path, "PEM file with the certificate's key, for the daemon's user only, without a password."
    )
    client_ca: Path | None = s.setting(
        None, s.path, "PEM file with the authorities that vouch for clients; nobody else is let in."
    )
    insecure: bool = s.setting(
        False,
        s.boolean,
        "Without TLS: whoever reaches the port reads what the rule anonymous=TENANT of server.tenants "
        "shows, and so does everybody on the way.",
    )

    @property
    def on(self) -> bool:
        return self.listen != "off"

    @property
    def files(self) -> CertificateFiles | None:
        """Where certificate and key are; None without TLS."""
        if self.insecure or self.certificate is None or self.key is None or self.client_ca is None:
            return None
        return CertificateFiles(self.certificate, self.key, self.client_ca)


def check_remote(remote: RemoteConfig, refuse: Refuse) -> None:
    """Refuses settings that are wrong only together with others."""
    if not remote.on:
        return
    given = {name: getattr(remote, name) for name in FILES}
    if remote.insecure:
        if any(given.values()):
            refuse(
                "remote.insecure",
                True,
                "a certificate is of no use without TLS: leave this out, or certificate, key and client_ca",
                *(f"remote.{name}" for name in FILES),
            )
        return
    for name, path in given.items():
        if path is None:
            refuse(
                f"remote.{name}",
                "",
                f"remote.listen is {remote.listen}, which takes TLS: name a PEM file, or set "
                "remote.insecure, where everybody on the way may read along",
                "remote.listen",
                "remote.insecure",
            )
