"""Replays a trace on fleets of several sizes, and says beside each figure what the formulas say.

    nice python -m tools.capacity.simulate TRACE --hosts 1,10,100 --kept 25%
    nice python -m tools.capacity.simulate --published $KVTIER_TRACES > docs/figures/capacity.json

The second form makes the figures of docs/capacity.md: a quarter of an hour, 4 GB. Traces are those that
`kvtierctl simulate` reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtierd.simulate.records import read_traces
from kvtierd.simulate.traces import TraceError, read

from tools.capacity import model
from tools.capacity.arguments import count, fraction, positive, size
from tools.capacity.segments import Segments, fleet_requests, segments
from tools.capacity.simulation import Counts, PutMode, Router, Setting, simulate

ENGINE_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    workload: str
    hosts: int
    router: Router = Router.PREFIX
    mode: PutMode = PutMode.ON_REUSE
    bytes_per_token: int = 320 * model.KIB
    pool_bytes: int = 512 * model.GIB
    store_size: int = 16 * model.TIB
    look_every_s: float = 5.0
    kept: float = 0.25
    common: float = 0.1
    seconds: float | None = None


Row = dict[str, object]


def run(parts: Segments, case: Case) -> Row:
    """Simulates a fleet. Returns settings, what was counted, by second where that makes sense, and under
    `said` what the formulas say."""
    requests = fleet_requests(
        parts, case.hosts, common_fraction=case.common, kept=case.kept, seconds=case.seconds
    )
    block_bytes = case.bytes_per_token * parts.trace.block_tokens
    engine_block = case.bytes_per_token * ENGINE_BLOCK_TOKENS
    full = model.blocks_per_pack(engine_block) * engine_block
    setting = Setting(
        case.hosts,
        case.pool_bytes // block_bytes,
        case.router,
        case.mode,
        case.store_size / block_bytes,
        case.look_every_s,
        blocks_per_pack=full / block_bytes,
    )
    counts = simulate(requests, setting)
    per_s = counts.requests / requests.seconds
    said = model.load(fleet_of(case, counts, per_s, block_bytes))
    return {
        "workload": case.workload,
        "hosts": case.hosts,
        "router": case.router.value,
        "mode": case.mode.value,
        "bytes_per_token": case.bytes_per_token,
        "pool_bytes": case.pool_bytes,
        "store_size": case.store_size,
        "look_every_s": case.look_every_s,
        "kept": case.kept,
        "common": requests.common_fraction,
        "seconds": requests.seconds,
        "requests_per_s": per_s,
        "prompt_tokens": counts.tokens / counts.requests,
        "host_hits": counts.host_hit_tokens / counts.tokens,
        "store_hits": counts.store_hit_tokens / counts.tokens,
        "put": counts.put_blocks / counts.asked_blocks,
        "put_again": counts.put_again_blocks / max(1, counts.put_blocks),
        "read": counts.read_blocks / counts.asked_blocks,
        "putting": counts.putting_requests / counts.requests,
        "busiest": counts.busiest,
        "counted": {
            "puts": counts.puts / requests.seconds,
            "lists": counts.lists / requests.seconds,
            "head_reads": counts.head_reads / requests.seconds,
            "range_reads": counts.packs_read / requests.seconds,
            "known_after_s": counts.known_after_s,
            "unknown_packs": counts.unknown_packs,
        },
        "said": {
            "puts": said.puts,
            "lists": said.lists,
            "head_reads": said.head_reads,
            "range_reads": said.range_reads,
            "known_after_s": said.known_after_s if math.isfinite(said.known_after_s) else None,
            "put_bytes": said.put_bytes,
            "read_bytes": said.read_bytes,
        },
    }


def fleet_of(case: Case, counts: Counts, requests_per_s: float, block_bytes: int) -> model.Fleet:
    """The fleet of the formulas that puts and reads as much as the simulated one."""
    return model.Fleet(
        hosts=case.hosts,
        requests_per_s=requests_per_s,
        prompt_tokens=counts.asked_blocks * block_bytes / case.bytes_per_token / counts.requests,
        put_fraction=counts.put_blocks / counts.asked_blocks,
        read_fraction=counts.read_blocks / counts.asked_blocks,
        putting_fraction=counts.putting_requests / counts.requests,
        bytes_per_token=case.bytes_per_token,
        look_every_s=case.look_every_s,
        store_size=case.store_size,
    )


def published() -> Iterator[Case]:
    """The runs of docs/capacity.md."""
    for hosts in (1, 10, 100, 1_000):
        for router in Router:
            # At a thousand hosts, putting everything shows nothing that a hundred do not.
            for mode in (PutMode.ON_REUSE, PutMode.THROUGH)[: 1 if hosts == 1_000 else 2]:
                yield Case("chat", hosts, router, mode)
    for hosts in (1, 10, 100):
        for router in Router:
            hours = 4 * 3_600.0 if hosts > 10 else None
            yield Case("agents", hosts, router, kept=1.0, seconds=hours)
    for hosts in (1, 10, 100, 1_000):
        yield Case("chat", hosts, bytes_per_token=70 * model.KIB)
    for hosts in (2, 5, 20, 50):  # only for the picture
        yield Case("chat", hosts)


FILES = {"chat": "mooncake_conversation.npz", "agents": "claude_code_dev.npz"}


def text_of(row: Row) -> str:
    """One run in two lines."""
    counted, said = row["counted"], row["said"]
    assert isinstance(counted, dict)
    assert isinstance(said, dict)
    pairs = ", ".join(
        f"{name} {_short(counted[name])} ({_short(value)})" for name, value in said.items() if name in counted
    )
    return (
        f"{row['workload']}, {row['hosts']} hosts, {row['router']}, {row['mode']}: of tokens, host "
        f"{row['host_hits']:.1%}, store {row['store_hits']:.1%}; put {row['put']:.1%}, read "
        f"{row['read']:.1%}\n"
        f"    a second, counted (said): {pairs}"
    )


def _short(value: float | None) -> str:
    return "never" if value is None else f"{value:,.3g}"


def _parser() -> argparse.ArgumentParser:
    usual = Case("", 1)
    parser = argparse.ArgumentParser(
        prog="python -m tools.capacity.simulate",
        description="Replays copies of a trace on fleets with a shared store.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, nargs="?", help="a trace that kvtierctl simulate reads")
    add("--published", type=Path, metavar="FOLDER", help="make the figures of docs/capacity.md; prints JSON")
    add("--hosts", default="1,10,100", help="numbers of hosts, each with a copy of the trace")
    add("--routers", default="prefix,round-robin", help="of prefix, round-robin")
    add("--modes", default="on-reuse", help="of on-reuse, through, never")
    add("--kept", type=fraction, default=usual.kept, help="part of the trace's sessions that a copy has")
    add("--common", type=fraction, default=usual.common, help="part of what is asked for that copies share")
    add("--bytes-per-token", type=size, default=usual.bytes_per_token)
    add("--pool", type=size, default=usual.pool_bytes, help="pool.size of each host")
    add("--store-size", type=size, default=usual.store_size, help="store.size")
    add("--look-every", type=positive, default=usual.look_every_s, help="store.look_every_s")
    add("--seconds", type=positive, default=None, help="use only so much of the trace")
    add("--json", action="store_true", help="print one JSON array")
    return parser


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """The runs that a command line asks for. Raises ArgumentTypeError and ValueError."""
    return [
        Case(
            arguments.trace.stem,
            hosts,
            Router(router),
            PutMode(mode),
            arguments.bytes_per_token,
            arguments.pool,
            arguments.store_size,
            arguments.look_every,
            arguments.kept,
            arguments.common,
            arguments.seconds,
        )
        for hosts in map(count, arguments.hosts.split(","))
        for router in arguments.routers.split(",")
        for mode in arguments.modes.split(",")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    found = parser.parse_args(arguments)
    if (found.trace is None) == (found.published is None):
        parser.error("name a trace, or a folder with --published")
    if found.published:
        traces = {name: segments(read(found.published / file)) for name, file in FILES.items()}
        cases = list(published())
    else:
        try:
            cases = cases_of(found)
        except (argparse.ArgumentTypeError, ValueError) as error:
            parser.error(str(error))
        try:
            trace, notes = read_traces((found.trace,), None)
        except (TraceError, OSError) as error:
            parser.error(f"no trace: {error}")
        for note in notes:
            print(note, file=sys.stderr)
        traces = {found.trace.stem: segments(trace)}
    rows = []
    gc.disable()  # a fleet has millions of objects, and no cycles among them
    try:
        for case in cases:
            began_s = time.monotonic()
            rows.append(run(traces[case.workload], case))
            as_json = found.json or found.published
            took = f"[{time.monotonic() - began_s:.0f} s]"
            print(text_of(rows[-1]), took, file=sys.stderr if as_json else None)
    finally:
        gc.enable()
    if found.json or found.published:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
