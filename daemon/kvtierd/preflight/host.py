"""Checks of the host itself, whatever is configured: kernel, limits, GPUs, memory nodes."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from kvtierd.config.descriptors import descriptors_wanted, shares_within
from kvtierd.preflight.asking import DEADLINE_S, ask
from kvtierd.preflight.findings import Finding, Situation, Verdict

KERNEL_MIN = (5, 14)
"""The first Linux with MADV_POPULATE_WRITE. Without it the pool is neither populated ahead of use nor
registered with a GPU."""
KERNEL_MIN_CONTAINERS = (6, 5)
"""The first Linux with SO_PEERPIDFD. Without it the daemon cannot see the death of a process in another pid
namespace."""
CUDA_MAJOR_LEAST = 12
INITIAL_PID_NAMESPACE = 0xEFFF_FFFC
"""The inode that the kernel gives the PID namespace of the host itself (PROC_PID_INIT_INO)."""
DEV = Path("/dev")
PROC = Path("/proc")
SYS = Path("/sys")


def check_kernel(_: Situation) -> Iterator[Finding]:
    """Checks that Linux is new enough."""
    release = os.uname().release
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version < KERNEL_MIN:
        remedy = (
            f"upgrade to Linux {_dotted(KERNEL_MIN)} or later: this one cannot populate the pool ahead of "
            "use, nor register it with a GPU"
        )
        yield Finding("kernel", Verdict.WARNING, release, remedy)
    elif version < KERNEL_MIN_CONTAINERS:
        wanted = _dotted(KERNEL_MIN_CONTAINERS)
        remedy = (
            f"where engines run in containers of their own, upgrade to Linux {wanted} or later, or run the "
            "daemon in the host's pid namespace (hostPID)"
        )
        yield Finding("kernel", Verdict.WARNING, release, remedy)
    else:
        yield Finding("kernel", Verdict.OK, release)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_limits(situation: Situation) -> Iterator[Finding]:
    """Checks the limits on open files, and on locked memory where there are GPUs, whose driver locks the
    pool."""
    wanted = descriptors_wanted(situation.config)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted:
        sessions_max = shares_within(situation.config, files).sessions
        found = f"at most {files:,}, and {wanted:,} may be needed: only {sessions_max} sessions are served"
        remedy = "raise the hard limit (in the unit: LimitNOFILE=65536; a shell: ulimit -Hn), or lower it"
        sessions = situation.config.server.sessions_max
        yield Finding("open files", Verdict.WARNING, found, remedy, "server.sessions_max", sessions)
    else:
        text = "no limit" if files == resource.RLIM_INFINITY else f"at most {files:,}"
        yield Finding("open files", Verdict.OK, f"{text}, {wanted:,} may be needed")
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("memlock", Verdict.OK, "no limit")
    elif locked < situation.config.pool.size and _gpu_nodes():
        found = f"at most {locked:,} bytes, and GPUs' workers lock the pool"
        remedy = "in the unit: LimitMEMLOCK=infinity (as deploy/systemd/kvtierd.service has it); ulimit -Hl"
        yield Finding("memlock", Verdict.WARNING, found, remedy)
    else:
        yield Finding("memlock", Verdict.OK, f"at most {locked:,} bytes; no GPU needs more")


def check_gpus(_: Situation) -> Iterator[Finding]:
    """Checks that the GPUs' driver answers and is new enough. Engines on CPUs are served without one."""
    nodes = _gpu_nodes()
    if not nodes:
        yield Finding("GPUs", Verdict.OK, "no NVIDIA driver here: engines on CPUs only")
        return
    [facts] = ask([["gpus", *nodes]])
    remedy = "until then engines on CPUs only are served"
    if facts is None:
        found = f"the driver does not answer within {DEADLINE_S:g} s"
        yield Finding("GPUs", Verdict.WARNING, found, f"see dmesg; {remedy}")
    elif facts.get("error"):
        yield Finding("GPUs", Verdict.WARNING, f"looking failed: {facts['error']}", f"see dmesg; {remedy}")
    elif facts["unreadable"]:
        found = f"cannot be opened: {', '.join(facts['unreadable'])}"
        start = "start nvidia-persistenced, or nvidia-modprobe -u -c 0; in a unit: DeviceAllow"
        yield Finding("GPUs", Verdict.WARNING, found, f"{start}; {remedy}")
    elif "cuda" not in facts:
        found = f"libcuda.so.1 cannot be loaded: {facts['library_error']}"
        install = "install the driver's library, or in a container use the NVIDIA runtime"
        yield Finding("GPUs", Verdict.WARNING, found, f"{install}; {remedy}")
    else:
        major, minor = divmod(facts["cuda"], 1000)
        found = f"driver for CUDA {major}.{minor // 10}"
        if major < CUDA_MAJOR_LEAST:
            install = "install driver 525 (CUDA 12.0) or later"
            yield Finding("GPUs", Verdict.WARNING, found, f"{install}; {remedy}")
        else:
            yield Finding("GPUs", Verdict.OK, found)
            yield from _check_sharing()


def check_compute_modes(_: Situation) -> Iterator[Finding]:
    """Checks whether GPUs let a second process in, beside their engine. Initialises the driver."""
    if not _gpu_nodes():
        return
    [facts] = ask([["closed-gpus"]])
    if facts is not None and (closed := facts.get("closed")):
        yield Finding(
            "compute mode",
            Verdict.WARNING,
            f"no second process may use GPU {', '.join(map(str, closed))}",
            "set it to DEFAULT (nvidia-smi -c DEFAULT), or start the daemon with the CUDA_MPS_PIPE_DIRECTORY "
            "of the MPS server that the engines use",
        )


def _check_sharing() -> Iterator[Finding]:
    """Checks whether the driver may refuse to open engines' memory because of PID namespaces."""
    if (PROC / "self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE:
        yield Finding("CUDA IPC", Verdict.OK, "kvtierd is in the host's PID namespace")
        return
    yield Finding(
        "CUDA IPC",
        Verdict.WARNING,
        "kvtierd is in a PID namespace of its own: the driver may not let it open the memory of engines in "
        "others",
        "start it and the engines in one (hostPID, shareProcessNamespace, --pid), or let engines allocate "
        "with expandable_segments:True; otherwise their blocks go through a mirror in host memory",
    )


def _gpu_nodes() -> list[str]:
    if not (DEV / "nvidiactl").exists():
        return []
    return [str(DEV / "nvidiactl"), str(DEV / "nvidia-uvm"), *map(str, sorted(DEV.glob("nvidia[0-9]*")))]


def check_numa(_: Situation) -> Iterator[Finding]:
    """Tells how many memory nodes there are."""
    nodes = sorted((SYS / "devices/system/node").glob("node[0-9]*"))
    yield Finding("NUMA", Verdict.OK, f"{len(nodes) or 1} {'node' if len(nodes) < 2 else 'nodes'}")
