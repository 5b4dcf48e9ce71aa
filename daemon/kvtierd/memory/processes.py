"""Names a process so that it can be proved to be gone later, even after its pid was given to another
process."""

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROUNDING_TICKS = 1
"""The offset of a time namespace need not be a whole number of ticks. No pid is reused within one tick."""


@dataclass(frozen=True, slots=True)
class ProcessName:
    """The name of one process for ever: no other process, on any boot of this machine, has the same."""

    pid: int
    start_ticks: int
    """When the process started: field 22 of /proc/PID/stat, as the initial time namespace shows it."""
    boot: int
    """The first 8 bytes of the kernel's boot id."""
    namespace: int
    """The inode of the pid namespace to which `pid` belongs."""


@cache
def kernel_boot() -> int:
    """The boot id of the running kernel, shortened to 8 bytes."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text()
    return int.from_bytes(bytes.fromhex(text.strip().replace("-", ""))[:8], "little")


@cache
def pid_namespace() -> int:
    """The pid namespace of this process."""
    return os.stat("/proc/self/ns/pid").st_ino


@cache
def time_offset_ticks() -> int:
    """What this process's time namespace adds to the start ticks that /proc shows; 0 in the initial one."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    for line in lines:
        clock, seconds, nanoseconds = line.split()
        if clock in ("boottime", str(time.CLOCK_BOOTTIME)):
            return (int(seconds) * 10**9 + int(nanoseconds)) * os.sysconf("SC_CLK_TCK") // 10**9
    return 0


def _stat(pid: int) -> tuple[str, int, int] | None:
    """The state, number of threads and start ticks of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[17]), int(fields[19]) - time_offset_ticks()


def name_process(pid: int) -> ProcessName:
    """Names a living process. Raises ValueError if there is none with this pid."""
    found = _stat(pid)
    if found is None:
        raise ValueError(f"pid {pid}: no such process")
    return ProcessName(pid, found[2], kernel_boot(), pid_namespace())


def proved_gone(name: ProcessName) -> bool:
    """True if no thread of the process exists any more. False also if that cannot be seen from here."""
    if name.boot != kernel_boot():
        return True
    if name.namespace != pid_namespace():
        return False  # its pid means nothing here
    found = _stat(name.pid)
    if found is None:
        try:
            os.kill(name.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False  # /proc hides it
    state, threads, start_ticks = found
    # The first thread of a process can be a zombie while others still run.
    another = abs(start_ticks - name.start_ticks) > ROUNDING_TICKS
    return another or (state in "ZX" and threads <= 1)
