"""Adds up what the fault campaigns have counted, and says what they must have counted at least.

A test counts through the fixture `count` (tests/conftest.py); pytest writes that into its results as
properties named count.NAME. It counts as it goes, so a campaign that fails half way says how far it got.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

PREFIX = "count."
NEVER = ("wrong_bytes", "lost_blocks")
"""Counts that must be 0, and must be there, because no count is no proof."""

IN_MAKE_TEST = {
    "daemon_kills": 14,
    "planned_restarts": 6,
    "pool_owner_kills": 25,
    "worker_kills": 1,
    "client_kills": 12,
    "client_stops": 4,
    "daemon_stops": 1,
    "clock_jumps": 300,
    "crash_points": 85,
    "corruptions_refused": 60,
    "daemon_kills_with_disks": 2,
    "disk_only_starts": 1,
    "disk_worker_kills": 1,
    "disk_worker_stops": 1,
    "disk_worker_hangs": 1,
    "disk_crash_points": 1,
    "disk_corruptions_refused": 50,
    "disk_faults_injected": 3,
    "disks_without_room": 2,
    "bad_requests_in_process": 20_000,
    "bad_requests_on_the_wire": 1_000,
    "bad_packets_on_the_side": 200,
    "blocks_compared": 20_000,
}
"""The counts of the campaigns in `make test` (tests/faults), which need neither an engine nor a double of a
GPU."""
SHORT = IN_MAKE_TEST | {"client_kills": 32, "engine_kills": 4, "daemon_stops": 2, "engine_rounds": 60}
GPU_KILLS_PER_CASE = 22
FAKE_GPU = {"gpu_kills": 200, "blocks_compared": 2_000}
"""The counts of `make test-fake-gpu`: eight cases of random kills, at more than their short length."""
LONG = {
    "daemon_kills": 1_000,
    "planned_restarts": 90,
    "pool_owner_kills": 1_500,
    "worker_kills": 35,
    "client_kills": 200,
    "client_stops": 48,
    "engine_stops": 2,
    "engine_rounds": 400,
    "clock_jumps": 350,
    "engine_kills": 10,
    "gpu_kills": 250,
    "daemon_stops": 13,
    "crash_points": 85,
    "corruptions_refused": 500,
    "daemon_kills_with_disks": 180,
    "disk_only_starts": 30,
    "disk_worker_kills": 60,
    "disk_worker_stops": 10,
    "disk_worker_hangs": 10,
    "disk_crash_points": 20,
    "disk_corruptions_refused": 500,
    "disk_faults_injected": 40,
    "disks_without_room": 2,
    "bad_requests_in_process": 1_000_000,
    "bad_requests_on_the_wire": 20_000,
    "bad_packets_on_the_side": 4_000,
    "blocks_compared": 500_000,
}


IN_TEST_FULL = IN_MAKE_TEST | {
    "daemon_kills": 60,
    "planned_restarts": 22,
    "pool_owner_kills": 375,
    "client_kills": 50,
    "client_stops": 12,
    "daemon_stops": 3,
    "corruptions_refused": 100,
    "daemon_kills_with_disks": 12,
    "bad_requests_in_process": 250_000,
    "bad_requests_on_the_wire": 5_000,
    "bad_packets_on_the_side": 1_000,
}
"""The counts of the same campaigns in `make test-full`."""


def counted(cases: Iterable[ElementTree.Element]) -> Counter[str]:
    """Returns the sums over all test cases of a JUnit file, whether they passed or not."""
    counts: Counter[str] = Counter()
    for case in cases:
        for entry in case.iter("property"):
            name = entry.get("name", "")
            if name.startswith(PREFIX):
                counts[name.removeprefix(PREFIX)] += int(entry.get("value", "0"))
    return counts


def total(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Returns the sums of several counts. What a test looked for and never found is kept, as 0."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    return counts


def text(counts: Mapping[str, int]) -> str:
    """Returns the counts in one line, for people."""
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in sorted(counts.items()))


def shortfalls(counts: Mapping[str, int], least: Mapping[str, int]) -> Iterator[str]:
    """Yields what is missing, and what there must not be; nothing if `least` is empty."""
    for name, number in least.items():
        if counts.get(name, 0) < number:
            yield f"{counts.get(name, 0):,} {name.replace('_', ' ')}, {number:,} are wanted"
    for name in NEVER if least else ():
        if name not in counts:
            yield f"nobody has looked for {name.replace('_', ' ')}"
        elif counts[name]:
            yield f"{counts[name]:,} {name.replace('_', ' ')}"
