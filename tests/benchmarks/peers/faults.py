"""What is left when an engine or a server dies, when a load is taken back, and when a stored byte flips."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.peers import content
from tests.benchmarks.peers.driver import MODELS, Peer, PeerRefused, Prompt
from tests.benchmarks.peers.running import Running

SHAPE = MODELS[0]
BLOCKS = 256
"""128 MiB."""
HELD_BLOCKS = 64
GIVE_UP_S = 15.0
"""Who has not given memory back by then has a timer for it that is longer."""
FLIPPED, FLIPPED_BLOCKS = 8, 16
"""Prompts with one changed byte each, and blocks of each."""
SAMPLED_S = 5.0
POLL_S = 0.002
SEED = 120_000
_SCAN_BYTES = 16 << 20


def measure(running: Running) -> dict[str, list[dict[str, Any]]]:
    """All faults, one peer after another."""
    found: dict[str, list[dict[str, Any]]] = {"engine_kill": [], "cancel": [], "daemon_kill": [], "flips": []}
    running.each(0, "cancel", lambda peer: found["cancel"].append(_cancel(running, peer)))
    running.each(0, "engine kill", lambda peer: found["engine_kill"].append(_engine_kill(running, peer)))
    running.each(0, "flipped bytes", lambda peer: found["flips"].extend(_flips(running, peer)))
    running.each(0, "daemon kill", lambda peer: found["daemon_kill"].append(_daemon_kill(running, peer)))
    return found


def _cancel(running: Running, peer: Peer) -> dict[str, Any]:
    """Seconds from the begin of a load of 128 MiB that is taken back at once until the engine may use its
    blocks again; the median of 5."""
    engine = running.register(peer, SHAPE, BLOCKS)
    engine.call("store", seed=SEED, blocks=BLOCKS)
    answers = [engine.call("cancel", seed=SEED, blocks=BLOCKS) for _ in range(5)]
    engine.call("clear")
    middle = sorted(answers, key=lambda answer: float(answer["seconds"]))[2]
    running.progress(f"cancel, {peer.title}: {middle['seconds'] * 1e3:.2f} ms ({middle['how']})")
    return {"peer": peer.name, **middle}


def _engine_kill(running: Running, peer: Peer) -> dict[str, Any]:
    """SIGKILL to an engine that has registered 128 MiB, and holds 64 blocks by a lookup: seconds until the
    server's processes map nothing of its memory and no file of it is left, and until nothing holds the
    blocks."""
    server = running.server(peer)
    assert server is not None, "memcpy has no server"
    witness = running.register(peer, SHAPE, HELD_BLOCKS, "witness")
    before = _shared_memory(server.pids())
    engine = running.register(peer, SHAPE, BLOCKS, "victim")
    engine.call("store", seed=SEED + 1, blocks=HELD_BLOCKS)
    engine.call("hold", seed=SEED + 1, blocks=HELD_BLOCKS)
    engines = {inode: size for inode, size in _shared_memory([engine.pid]).items() if inode not in before}
    files = _files_of(engines)
    began_s = time.monotonic()
    running.forget(peer, "victim")
    memory_s = holds_s = float("inf")
    held_bytes = 0
    while time.monotonic() - began_s < GIVE_UP_S and max(memory_s, holds_s) == float("inf"):
        now_s = time.monotonic() - began_s
        if memory_s == float("inf"):
            mapped = _shared_memory(server.pids())
            left = {inode for inode in engines if inode in mapped}
            left |= {inode for inode, path in files.items() if path.exists()}
            held_bytes = sum(engines[inode] for inode in left)
            if not left:
                memory_s = now_s
        if holds_s == float("inf") and not witness.call("held", seed=SEED + 1, blocks=HELD_BLOCKS):
            holds_s = time.monotonic() - began_s
        time.sleep(POLL_S)
    for path in files.values():
        path.unlink(missing_ok=True)  # what the peer leaves behind in /dev/shm
    witness.call("clear")
    row = {
        "peer": peer.name,
        "shared_bytes": sum(engines.values()),
        "memory_s": _finite(memory_s),
        "held_bytes": held_bytes,
        "holds_s": _finite(holds_s),
        "seconds": _finite(max(memory_s, holds_s)),
        "gave_up_s": GIVE_UP_S,
    }
    running.progress(
        f"engine kill, {peer.title}: memory {_seconds(memory_s)}, holds of its lookups {_seconds(holds_s)}"
    )
    return row


def _daemon_kill(running: Running, peer: Peer) -> dict[str, Any]:
    """SIGKILL to the server with 128 MiB stored, and a start: seconds from the kill until an engine that
    registers then has the answer to its first lookup, and the part of the blocks that it loads with the right
    bytes."""
    server = running.server(peer)
    assert server is not None, "memcpy has no server"
    engine = running.register(peer, SHAPE, BLOCKS)
    engine.call("store", seed=SEED + 2, blocks=BLOCKS)
    engine.call("try_load", seed=SEED + 2, blocks=BLOCKS)
    running.forget(peer, "engine")
    fresh = running.engine(peer, "after")
    fresh.call("warm")
    began_s = time.monotonic()
    server.kill()
    server.restart()
    serving_s = time.monotonic() - began_s
    running.register(peer, SHAPE, BLOCKS, "after")
    answer = fresh.call("until_found", seed=SEED + 2, blocks=BLOCKS, most_s=1.0)
    warm_s = time.monotonic() - began_s
    loaded = fresh.call("try_load", seed=SEED + 2, blocks=BLOCKS)
    row = {
        "peer": peer.name,
        "serving_s": serving_s,
        "warm_s": warm_s if answer["hits"] else None,
        "kept_share": loaded["right"] / BLOCKS,
        "wrong_blocks": loaded["wrong"],
    }
    running.progress(
        f"daemon kill, {peer.title}: serves after {serving_s:.2f} s,"
        f" {row['kept_share']:.0%} of the blocks kept"
    )
    return row


def _flips(running: Running, peer: Peer) -> list[dict[str, Any]]:
    """One byte of each of 8 prompts is changed in the server's memory. How many are then served with a wrong
    byte, and how many refused: at once; after 5 s in which nothing else happens; and after a kill of the
    server, where anything is left then."""
    server = running.server(peer)
    assert server is not None, "memcpy has no server"
    rows = []
    for number, (when, wait_s) in enumerate((("at once", 0.0), (f"{SAMPLED_S:.0f} s later", SAMPLED_S))):
        engine = running.register(peer, SHAPE, FLIPPED_BLOCKS)
        engine.call("clear")
        first = SEED + 100 * (number + 1)
        rows.append(_flip(running, peer, first, when, wait_s, restart=False))
    engine = running.register(peer, SHAPE, FLIPPED_BLOCKS)
    engine.call("clear")
    rows.append(_flip(running, peer, SEED + 500, "after the server's kill", 0.0, restart=True))
    for row in rows:
        running.progress(
            f"flipped bytes, {peer.title}, {row['when']}: {row['served']} of {row['flipped']} served wrong,"
            f" {row['refused']} refused"
        )
    return rows


def _flip(
    running: Running, peer: Peer, first: int, when: str, wait_s: float, *, restart: bool
) -> dict[str, Any]:
    server = running.server(peer)
    assert server is not None
    engine = running.engine(peer)
    prompts = [Prompt(first + number, FLIPPED_BLOCKS) for number in range(FLIPPED)]
    for prompt in prompts:
        engine.call("store", seed=prompt.seed, blocks=prompt.blocks)
    flipped = flip_bytes(server.pids(), [content.first_bytes(prompt, 3, 64) for prompt in prompts])
    time.sleep(wait_s)
    if restart:
        running.forget(peer, "engine")
        server.kill()
        server.restart()
        engine = running.register(peer, SHAPE, FLIPPED_BLOCKS)
    served = refused = 0
    for prompt in prompts:
        answer = engine.call("try_load", seed=prompt.seed, blocks=prompt.blocks)
        served += bool(answer["wrong"])
        refused += not answer["wrong"] and answer["right"] < prompt.blocks
    if flipped != len(prompts):
        raise PeerRefused(f"only {flipped} of {len(prompts)} blocks were found in the server's memory")
    return {"peer": peer.name, "when": when, "flipped": flipped, "served": served, "refused": refused}


def flip_bytes(pids: list[int], patterns: list[bytes]) -> int:
    """Changes one byte behind each of these beginnings of blocks, wherever in the memory of these processes
    it is first found. Returns of how many it was found."""
    left = list(patterns)
    done: set[tuple[int, int]] = set()
    for pid in pids:
        for first, last, inode, offset in _writable(pid):
            if inode and (inode, offset) in done:
                continue
            done.add((inode, offset))
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                for start in range(first, last, _SCAN_BYTES):
                    _flip_in(memory, start, min(last, start + _SCAN_BYTES + 4096), left)
                    if not left:
                        return len(patterns)
    return len(patterns) - len(left)


def _flip_in(memory: Any, start: int, end: int, left: list[bytes]) -> None:
    try:
        memory.seek(start)
        part = memory.read(end - start)
    except (OSError, ValueError, OverflowError):
        return  # a mapping that cannot be read, like a device's
    for pattern in [each for each in left if each in part]:
        at = start + part.index(pattern) + 40
        memory.seek(at)
        byte = memory.read(1)[0]
        memory.seek(at)
        memory.write(bytes([byte ^ 0x10]))
        left.remove(pattern)


def _writable(pid: int) -> list[tuple[int, int, int, int]]:
    """First and last address, inode and offset of what a process maps to write, large mappings first."""
    found = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        span, rights, offset, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(each, 16) for each in span.split("-"))
        if rights.startswith("rw") and last - first >= 1 << 20:
            found.append((first, last, int(inode), int(offset, 16)))
    return sorted(found, key=lambda each: each[0] - each[1])


def _shared_memory(pids: list[int]) -> dict[int, int]:
    """Inodes of files in memory that these processes map to share, with the bytes mapped."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # ended meanwhile
        sizes: dict[int, int] = {}
        for line in lines:
            span, rights, _, _, inode, *path = line.split(maxsplit=5)
            if "s" in rights and path and path[0].startswith(("/dev/shm/", "/memfd:")):
                first, last = (int(each, 16) for each in span.split("-"))
                sizes[int(inode)] = sizes.get(int(inode), 0) + last - first
        found |= sizes
    return found


def _files_of(inodes: dict[int, int]) -> dict[int, Path]:
    """Which of them have a name in /dev/shm."""
    found = {}
    for entry in os.scandir("/dev/shm"):
        try:
            if entry.inode() in inodes and entry.is_file():
                found[entry.inode()] = Path(entry.path)
        except FileNotFoundError:
            pass  # gone meanwhile
    return found


def _finite(seconds: float) -> float | None:
    return seconds if seconds != float("inf") else None


def _seconds(seconds: float) -> str:
    return f"after {seconds * 1e3:.0f} ms" if seconds != float("inf") else f"not within {GIVE_UP_S:.0f} s"
