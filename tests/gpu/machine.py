"""The facts under which a run's numbers hold: hardware, driver, kernel, memory settings, source."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("clients", "daemon", "kernels", "proto", "tests/gpu")
SOURCE_SUFFIXES = {".py", ".cpp", ".hpp", ".h", ".proto"}
COMMAND_S = 20
PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "grpcio",
    "protobuf",
    "uvloop",
    "nanobind",
    "pytest",
    "pytest-asyncio",
)
GPU_FIELDS = (
    "name",
    "uuid",
    "driver_version",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
    "compute_mode",
    "clocks.sm",
    "clocks.mem",
)


def said_by(*command: str) -> str | None:
    """What a command prints; None if there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False, cwd=REPO
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def contents(path: str | Path) -> str | None:
    """What a file of the kernel's says; None where it has none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def gpus() -> list[dict[str, Any]]:
    """What nvidia-smi says of each GPU, and the NUMA node that the kernel puts it on; empty without it."""
    text = said_by("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    found: list[dict[str, Any]] = []
    for values in csv.reader((text or "").splitlines(), skipinitialspace=True):
        gpu: dict[str, Any] = dict(zip(GPU_FIELDS, values, strict=False))
        # nvidia-smi writes an eight-digit domain, the kernel's names have four.
        device = Path("/sys/bus/pci/devices") / str(gpu.get("pci.bus_id", "")).lower()[-12:]
        for name in ("numa_node", "current_link_speed", "current_link_width", "max_link_speed"):
            gpu[f"sysfs.{name}"] = contents(device / name)
        found.append(gpu)
    return found


def hardware() -> dict[str, Any]:
    """The machine."""
    cpus = [line for line in (contents("/proc/cpuinfo") or "").splitlines() if line.startswith("model name")]
    return {
        "gpus": gpus(),
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _meminfo("MemTotal"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "kernel": f"{platform.system()} {platform.release()}",
        "glibc": platform.libc_ver()[1],
    }


def conditions() -> dict[str, Any]:
    """What else numbers depend on, read before anything is run."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": os.getloadavg()[0],
        "memory_available": _meminfo("MemAvailable"),
        "huge_pages_free": _meminfo("HugePages_Free"),
        "thp": contents("/sys/kernel/mm/transparent_hugepage/enabled"),
        "thp_shmem": contents("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "dev_shm_bytes": shutil.disk_usage("/dev/shm").total,
        "memlock_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "user": os.getuid(),
        "cuda_module_loading": os.environ.get("CUDA_MODULE_LOADING", ""),
        "cuda_library": os.environ.get("KVTIER_CUDA_LIBRARY", ""),
        "mps": bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY")) or Path("/tmp/nvidia-mps/control").exists(),
    }


def source(commit: str = "") -> dict[str, Any]:
    """Which code ran: the commit where it is known, and a digest of the sources, which tells two trees apart
    wherever they lie."""
    known = commit or (said_by("git", "rev-parse", "HEAD") or "").strip() or "unknown"
    changed = said_by("git", "status", "--porcelain", "--", *SOURCE_ROOTS)
    return {"commit": known, "changed_files": len((changed or "").splitlines()), "digest": source_digest()}


def source_digest() -> str:
    """16 hexadecimal digits over the names and contents of our sources."""
    total = hashlib.sha256()
    for root in SOURCE_ROOTS:
        for path in sorted((REPO / root).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and path.is_file():
                total.update(f"{path.relative_to(REPO)}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def short_name(facts: dict[str, Any], fake: bool) -> str:
    """A word for the hardware, fit for a folder's name: `nvidia-h200`."""
    if fake:
        return "fake-driver"
    name = str(facts["gpus"][0]["name"]) if facts["gpus"] else "no-gpu"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _meminfo(name: str) -> str | None:
    for line in (contents("/proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return line.split(":", 1)[1].strip()
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
