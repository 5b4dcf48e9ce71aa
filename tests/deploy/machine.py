"""A machine whose pid 1 is a real systemd, in namespaces of its own, and the installation it starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 180.0
EMPTY_TARGETS = ("basic.target", "sysinit.target", "shutdown.target", "umount.target", "final.target")
CGROUPS = Path("/sys/fs/cgroup")


class Machine:
    """Booted when made; `power_off` ends every process in it."""

    def __init__(self, venv: Path, *, drop_in: str = "", config: str, shipped: bool = True) -> None:
        """`venv`: an installation, seen at /opt/kvtier. `drop_in` goes beside the unit as it is shipped;
        without `shipped` there is no unit yet, no user and no configuration."""
        self._home = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        self.exchange = self._home / "exchange"
        units = self._home / "units"
        folder = self._home / "folder"
        for path in (self.exchange, units, folder):
            path.mkdir()
        for target in EMPTY_TARGETS:
            (units / target).write_text(f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")
        for source in (REPO / "deploy/systemd").iterdir() if shipped else ():
            shutil.copy(source, units)
        extra = units / "kvtierd.service.d"
        extra.mkdir()
        (extra / "test.conf").write_text(
            # The interpreter was moved, and may look for its library where it was.
            "[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/python/lib\n"
            "StandardOutput=append:/run/exchange/log\nStandardError=append:/run/exchange/log\n" + drop_in
        )
        (self.exchange / "kvtierd.toml").write_text(config)
        self._cgroups = [self._make_cgroup(place) for place in _cgroup_places()]
        self._log = (self._home / "systemd.log").open("w+")
        boot = Path(__file__).with_name("boot.sh")
        self._unshare = subprocess.Popen(
            [
                *(
                    "sh",
                    "-c",
                    'for group in $GROUPS_OF_TEST; do echo $$ > $group/cgroup.procs; done; exec "$@"',
                    "sh",
                ),
                *("unshare", "--mount", "--pid", "--fork", "--cgroup", "--uts", "--ipc", "--kill-child"),
                *(str(boot), str(folder), str(units), sys.base_prefix, str(venv), str(REPO)),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"GROUPS_OF_TEST": " ".join(map(str, self._cgroups))},
            start_new_session=True,
        )
        try:
            self._until(lambda: self.pid1 is not None, "pid 1")
            self._until(lambda: self.run("systemctl", "is-active", "basic.target")[0] == 0, "systemd is up")
            if not shipped:
                return
            self.must("mkdir", "-p", "/etc/kvtier")
            self.must("cp", "/run/exchange/kvtierd.toml", "/etc/kvtier/kvtierd.toml")
            self.must("systemd-sysusers", "/run/units/kvtier.sysusers")
            self.must("systemd-tmpfiles", "--create", "/run/units/kvtier.tmpfiles")
        except BaseException:
            print(self.log())
            self.power_off()
            raise

    @staticmethod
    def _make_cgroup(place: Path) -> Path:
        made = place / f"kvtier-test-{os.getpid()}-{time.monotonic_ns()}"
        made.mkdir()
        return made

    @property
    def pid1(self) -> int | None:
        """systemd's, as this machine sees it."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text().strip() != "systemd":
            return None
        return int(children[0])

    def run(self, *command: str, wrap: Sequence[str] = ()) -> tuple[int, str]:
        """Runs a command in it as root: exit status and output. `wrap` goes before the command in there."""
        enter = [
            "nsenter",
            f"--target={self.pid1}",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--root",
            "--wdns=/",
        ]
        try:
            done = subprocess.run(
                [*enter, *wrap, *command],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"LD_LIBRARY_PATH": "/opt/python/lib"},
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{command} took too long: {late.stdout!r}\n{self.log()}") from late
        return done.returncode, done.stdout + done.stderr

    def must(self, *command: str, wrap: Sequence[str] = ()) -> str:
        """The same; it has to succeed. Its output."""
        status, said = self.run(*command, wrap=wrap)
        assert status == 0, f"{command}: status {status}\n{said}\n{self.log()}"
        return said

    def show(self, name: str, unit: str = "kvtierd") -> str:
        """A property of a unit."""
        return self.must("systemctl", "show", "--value", "-p", name, unit).strip()

    def processes(self) -> list[int]:
        """Of the service, as the machine itself numbers them."""
        status, said = self.run("systemctl", "show", "--value", "-p", "ControlGroup", "kvtierd")
        places = [Path(f"/sys/fs/cgroup/{kind}{said.strip()}/cgroup.procs") for kind in ("systemd", ".")]
        found = "".join(self.run("cat", str(place))[1] for place in places if status == 0 and said.strip())
        return [int(line) for line in found.split() if line.isdigit()]

    def log(self) -> str:
        """What systemd, and what the service has said."""
        self._log.seek(0)
        service = self.exchange / "log"
        return self._log.read() + (service.read_text() if service.exists() else "")

    def until(self, condition: object, what: str) -> None:
        self._until(condition, what)

    def _until(self, condition: object, what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline_s, f"still not: {what}\n{self.log()}"
            assert self._unshare.poll() is None, f"the machine has ended\n{self.log()}"
            time.sleep(0.05)

    def power_off(self) -> None:
        """Kills pid 1, and with it all of the pid namespace; removes what was made outside."""
        pid1 = self.pid1 if self._unshare.poll() is None else None
        if pid1 is not None:
            os.kill(pid1, signal.SIGKILL)
        else:
            self._unshare.kill()
        self._unshare.wait(DEADLINE_S)
        self._log.close()
        for group in self._cgroups:
            for folder, _, _ in os.walk(group, topdown=False):
                _remove_cgroup(Path(folder))
        shutil.rmtree(self._home)


def _remove_cgroup(folder: Path) -> None:
    deadline_s = time.monotonic() + 10
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:  # a process of it is being reaped still
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _cgroup_places() -> list[Path]:
    """Where a group of our own has to be made, so that what the machine makes is below it."""
    places = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            root = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "unified"
        elif kinds in ("name=systemd", "devices"):
            root = CGROUPS / kinds.removeprefix("name=")
        else:
            continue
        if root.exists():
            places.append(root / path.lstrip("/"))
    return places
