"""`kvtierctl top`: two pictures of the daemon, and what happened between them, in 80 columns."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size
from kvtierd.ctl.lists import state_of, table
from kvtierd.ctl.text import CPU, DISK_PREFIX, bar, duration

WIDTH = 80
ENGINES_MAX = 8
REASONS = ("absent", "pending", "beyond", "recompute", "lease_limit", "draining", "not_ready")


@dataclass(frozen=True, slots=True)
class Picture:
    """A status, and when it was taken, in monotonic seconds."""

    status: admin_pb2.StatusResponse
    at_s: float


def frame(before: Picture | None, now: Picture, period_s: float) -> Iterator[str]:
    """The lines of one frame, none longer than WIDTH. Without `before`, and after a restart, rates are since
    the start of the daemon."""
    for line in _lines(before, now, period_s):
        yield line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _lines(before: Picture | None, now: Picture, period_s: float) -> Iterator[str]:
    status = now.status
    if before is None or before.status.boot_nonce != status.boot_nonce:
        before = None
    passed_s = max(1e-3, status.uptime_s if before is None else now.at_s - before.at_s)
    since = admin_pb2.StatusResponse() if before is None else before.status

    def rate(name: str) -> float:
        grown = int(getattr(status.counters, name)) - int(getattr(since.counters, name))
        return max(0, grown) / passed_s

    over = "since its start" if before is None else f"every {period_s:g} s"
    yield f"kvtierd {status.version}  {status.state}  up {duration(status.uptime_s)}  ({over})"
    pool = status.pool
    share = pool.used_bytes / pool.capacity_bytes if pool.capacity_bytes else 0.0
    yield (
        f"Pool   {bar(share)} {share:4.0%} of {human_size(pool.capacity_bytes)}  "
        f"{status.blocks.ready:,} blocks  {number(rate('evicted_blocks'))}/s evicted"
    )
    asked = rate("lookup_hashes")
    hits = rate("lookup_hits") / asked if asked else 0.0
    yield f"Hits   {bar(hits)} {hits:4.0%} of {number(asked)} hashes/s in {number(rate('lookups'))} lookups/s"
    missed = {reason: rate(f"missed_{reason}") for reason in REASONS}
    most_first = sorted((each for each in missed.items() if each[1]), key=lambda each: -each[1])
    text = "  ".join(f"{reason.replace('_', ' ')} {number(each)}/s" for reason, each in most_first)
    yield f"Missed {text or '-'}"
    yield (
        f"Store  {human_size(rate('stored_bytes')):>9}/s  {number(rate('stored_blocks')):>6} blocks/s  "
        f"{number(rate('deduplicated_blocks'))}/s there already, {number(rate('throttled_blocks'))}/s no room"
    )
    promoted = f"{number(rate('promoted_blocks'))}/s from disks" if status.disks else "no disks"
    loaded = number(rate("loaded_blocks"))
    yield f"Load   {human_size(rate('loaded_bytes')):>9}/s  {loaded:>6} blocks/s  {promoted}"
    failed = rate("failed_transfers") + rate("cancelled_transfers")
    yield (
        f"Now    {status.transfers_active:,} transfers ({number(failed)}/s fail), "
        f"{status.leases:,} leases on {status.leased_blocks:,} blocks"
    )
    if status.counters.integrity_failures:
        yield f"CORRUPT {status.counters.integrity_failures:,} blocks failed their check and were not served"
    if status.counters.audit_mismatches:
        yield f"AUDITS  {status.counters.audit_mismatches:,} found blocks that their engine does not compute"
    yield ""
    yield from _engines(status)
    yield ""
    yield from _workers(status)
    yield from _disks(status, since if before is not None else None, passed_s)


def _engines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    if not status.instances:
        yield "no engine is attached"
        return
    busiest = sorted(status.instances, key=lambda each: -each.mapped_bytes)[:ENGINES_MAX]
    rows = [("ENGINE", "STATE", "MODEL", "MAPPED", "LEASED", "TRANSFERS")]
    rows += [
        (
            shortened(each.instance, 22),
            state_of(each),
            shortened(each.model or "-", 18),
            human_size(each.mapped_bytes),
            f"{each.leased_blocks:,}",
            f"{each.transfers_active:,}",
        )
        for each in busiest
    ]
    yield from table(rows)
    if len(status.instances) > len(busiest):
        yield f"and {len(status.instances) - len(busiest)} more"


def _workers(status: admin_pb2.StatusResponse) -> Iterator[str]:
    workers = [each for each in status.workers if not each.device.startswith(DISK_PREFIX)]
    if not workers:
        return
    rows = [("WORKER", "STATE", "PARTS", "MAPPED", "REGISTERED", "REPLACED")]
    rows += [
        (
            shortened(each.device, 24),
            each.state,
            f"{each.parts_active:,}",
            human_size(each.mapped_bytes),
            "-" if each.device == CPU else human_size(each.registered_bytes),
            f"{each.respawns:,}",
        )
        for each in workers
    ]
    yield from table(rows)


def _disks(
    status: admin_pb2.StatusResponse, since: admin_pb2.StatusResponse | None, passed_s: float
) -> Iterator[str]:
    if not status.disks:
        return
    yield ""
    earlier = {disk.path: disk for disk in since.disks} if since is not None else {}
    rows = [("DISK", "STATE", "FULL", "READ", "WRITTEN", "QUEUED", "ERRORS")]
    for disk in status.disks:
        was = earlier.get(disk.path, admin_pb2.DiskStatus())
        full = disk.used_bytes / disk.capacity_bytes if disk.capacity_bytes else 0.0
        rows.append(
            (
                shortened(disk.path, 24),
                disk.state,
                f"{full:.0%}",
                f"{human_size(max(0, disk.read_bytes - was.read_bytes) / passed_s)}/s",
                f"{human_size(max(0, disk.written_bytes - was.written_bytes) / passed_s)}/s",
                human_size(disk.reading_bytes + disk.writing_bytes),
                f"{disk.errors:,}",
            )
        )
    yield from table(rows)


def number(value: float) -> str:
    """0, <0.1, 0.3, 12, 45.6k, 2.1M."""
    if 0 < value < 0.1:
        return "<0.1"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):.3g}{unit}"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def shortened(text: str, width: int) -> str:
    """Its end tells names apart more often than its beginning."""
    return text if len(text) <= width else f"…{text[1 - width :]}"
