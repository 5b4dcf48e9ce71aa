"""Which peers there are, which of them can be measured here, and why the others cannot."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.benchmarks import lmcache_peer
from tests.benchmarks.lmcache_peer import LMCacheUnavailable
from tests.benchmarks.peers import kvtier_peer, lmcache_server_peer, memcpy_peer, mooncake_peer
from tests.benchmarks.peers.driver import Peer, PeerAbsent, PeerServer, PlaceForServers

PEERS = (
    kvtier_peer.KVTIER,
    lmcache_server_peer.ZMQ,
    lmcache_server_peer.ZMQ_ENGINE_COPIES,
    lmcache_server_peer.GRPC,
    lmcache_server_peer.ZMQ_FINE,
    lmcache_server_peer.GRPC_FINE,
    mooncake_peer.MOONCAKE,
    memcpy_peer.MEMCPY,
)
LOOKUP_PEERS = ("kvtier", "lmcache_zmq_16", "lmcache_grpc_16", "lmcache_zmq", "mooncake")
COPY_PEERS = ("kvtier", "lmcache_zmq", "lmcache_zmq_engine", "lmcache_grpc", "mooncake", "memcpy")
FAULT_PEERS = ("kvtier", "lmcache_zmq", "lmcache_zmq_engine", "mooncake")

SERVERS: dict[str, Callable[[PlaceForServers], PeerServer]] = {
    "kvtier": kvtier_peer.KvtierServer,
    "mooncake": mooncake_peer.MooncakeServer,
} | {
    f"lmcache {transport} {chunk}": partial(
        lmcache_server_peer.LMCachePeerServer, transport=transport, chunk_tokens=chunk
    )
    for transport in ("zmq", "grpc")
    for chunk in (16, 256)
}
"""By `Peer.server`."""


@dataclass(frozen=True)
class AbsentPeer:
    """A peer that is not measured, and why in one line."""

    title: str
    why: str


def find_out(progress: Callable[[str], None]) -> tuple[list[Peer], list[AbsentPeer]]:
    """Installs what can be installed. Returns those that can be measured, and the others."""
    absent = list(never_here())
    missing: dict[str, str] = {}
    for name, install in (("lmcache", lmcache_peer.install), ("mooncake", mooncake_peer.install)):
        progress(f"installing {name} into its own environment, unless it is there")
        try:
            install()
        except (LMCacheUnavailable, PeerAbsent) as error:
            missing[name] = str(error)
    for name, why in missing.items():
        absent.append(AbsentPeer({"lmcache": "LMCache's server", "mooncake": "Mooncake Store"}[name], why))
    here = [peer for peer in PEERS if peer.name.split("_")[0] not in missing]
    return here, absent


def never_here() -> Iterable[AbsentPeer]:
    """Peers that no registry has for a machine like this one."""
    yield AbsentPeer(
        "kvblockd/KVStash 1.0",
        "PyPI has only its Python client (kvblockd 0.1.0, and kvstash as another name of it); its daemon is a"
        " Go binary that no package registry distributes",
    )
    gpu = has_gpu()
    yield AbsentPeer(
        "PegaFlow 0.25",
        "its server takes KV from CUDA memory only, "
        + ("and there is no adapter for it yet" if gpu else "and this machine has no NVIDIA GPU"),
    )
    yield AbsentPeer("vLLM's own CPU offloading", _offloading(gpu))


def _offloading(gpu: bool) -> str:
    if gpu:
        return "it lives inside of an engine: only a replay through a vLLM for CUDA could measure it"
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not installed"
    return (
        f"vLLM {version} for the CPU refuses it when an engine starts (“CPU Offloading is currently only"
        " supported on CUDA-alike and XPU GPUs”), and this machine has no GPU"
    )


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU that could be used."""
    return Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is not None


def versions(peers: Iterable[Peer]) -> dict[str, str]:
    """Of everything that was measured, as far as it has one."""
    found = {name: _version(name) for name in ("kvtier", "vllm", "torch", "numpy", "grpcio")}
    names = {peer.name.split("_")[0] for peer in peers}
    if "lmcache" in names:
        found["lmcache"] = lmcache_peer.PACKAGES[0].partition("==")[2]
    if "mooncake" in names:
        found["mooncake"] = mooncake_peer.PACKAGE.partition("==")[2]
    found["commit"] = commit()
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of this tree, with a mark if it is not as committed; "" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=mooncake_peer.REPO, capture_output=True, text=True, check=False)
    return done.stdout.strip()
