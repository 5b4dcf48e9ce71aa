"""The page that `kvtierctl status` prints for people."""

import math
from collections.abc import Iterator

from kvtier.v1 import admin_pb2
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.config.settings import human_size, size_and_parts
from kvtierd.ctl.lists import DISK_PREFIX, TENANT, WORKER, copy_workers, engines, refused_imports
from kvtierd.ctl.terminal import bar, facts, indented, state, table
from kvtierd.ctl.text import count, duration, scrub_line, sizes_line, usable_bytes

Facts = Iterator[tuple[str, RenderableType]]


def page(status: admin_pb2.StatusResponse) -> Group:
    """The whole status, section by section."""
    head = Text.assemble(
        (f"kvtierd {status.version}", "bold"),
        "  ",
        state(status.state),
        f"  pid {status.pid}" if status.pid else "",
        f"  up {duration(status.uptime_s)}",
    )
    # They are not told to other hosts, which cannot use them.
    addresses = [("socket", status.socket), ("metrics", status.metrics_url or "off")] if status.socket else []
    parts: list[RenderableType] = [facts(head, addresses)]
    pool = title("Pool", status.pool.path or "anonymous memory")
    parts.append(facts(pool, [*_pool(status), *_integrity(status)]))
    for number, disk in enumerate(status.disks):
        worker = next((each.pid for each in status.workers if each.device == f"{DISK_PREFIX}{number}"), 0)
        name = title("Store" if disk.shared else "Disk", disk.path, disk.state, disk.why)
        parts.append(facts(name, _disk(disk, worker)))
    parts.append(facts(title("Traffic", "since the start"), _traffic(status)))
    if status.HasField("events"):
        parts.append(facts(title("Events", status.events.endpoint), _events(status.events)))
    parts.append(_engines(status))
    if status.tenants:
        parts.append(Group(title("Tenants"), indented(table(TENANT, status.tenants))))
    parts.append(_workers(status))
    return Group(*(line for part in parts for line in (part, Text(""))))


def title(name: str, about: str = "", state_name: str = "", why: str = "") -> Text:
    """The title of a section, and what it is about."""
    line = Text.assemble((f"{name:<12}", "bold"), " ", about)
    if state_name:
        line.append("  ").append_text(state(state_name)).append(f": {why}" if why else "")
    return line


def used(used_bytes: int, capacity_bytes: int, besides: str = "") -> Text:
    """How full something is."""
    share = used_bytes / capacity_bytes if capacity_bytes else 0.0
    sizes = f"{human_size(used_bytes)} of {human_size(capacity_bytes)}{besides}"
    return Text.assemble(bar(share), f" {share:4.0%}  {sizes}")


def _pool(status: admin_pb2.StatusResponse) -> Facts:
    pool, blocks = status.pool, status.blocks
    if pool.size_bytes:  # a daemon of an earlier version does not tell it
        yield "size", size_and_parts(pool.size_bytes, pool.file_bytes, pool.capacity_bytes)
    if usable_bytes(pool) < pool.capacity_bytes:
        share = (
            f"{usable_bytes(pool) / pool.capacity_bytes:.0%}, {human_size(usable_bytes(pool))}, can be used"
        )
        rest = f"no memory for the rest: {pool.shortage}" if pool.shortage else "the rest follows"
        yield "memory", f"{share}; {rest}"
    yield "used", used(pool.used_bytes, usable_bytes(pool))
    yield "blocks", f"{blocks.ready:,} ready, {blocks.writing:,} writing, {blocks.evicting:,} evicting"
    yield "extents", f"{pool.extents - pool.extents_free:,} assigned, {pool.extents_free:,} free"
    if pool.start == "warm":
        found = f"{pool.recovered_blocks:,} blocks, {human_size(pool.recovered_bytes)}"
        discarded = count(pool.discarded_slots, "slot")
        yield "start", f"warm: {found} found in {pool.recovery_s:.2f} s, {discarded} discarded"
    else:
        yield "start", f"cold: {pool.cold_reason}"
    if pool.quarantined_slots:
        yield (
            "quarantine",
            f"{count(pool.quarantined_slots, 'slot')}: a process of an earlier daemon may still write there",
        )


def _integrity(status: admin_pb2.StatusResponse) -> Facts:
    """What sampling can be expected to find, and no more than that."""
    integrity = status.integrity
    when = "before every load" if integrity.verify == "always" else "before its first load after a restart"
    yield "verify", f"by record on every load; a block's data {when}"
    if not integrity.sample_bytes_per_s:
        yield "sampling", "off"
    else:
        yield (
            "sampling",
            "if bytes of a block change by themselves, this is noticed after "
            f"{duration(max(1, math.ceil(integrity.expected_detection_s)))} on average "
            f"({human_size(integrity.sample_bytes_per_s)}/s are read at most, less while blocks are copied)."
            f"{'' if integrity.verify == 'always' else ' Until then, a load may get the changed bytes.'}",
        )
        slots = count(integrity.sampled_slots, "slot")
        yield "", f"{slots}, {human_size(integrity.sampled_bytes)} compared so far"
    if integrity.corrupt_slots:
        yield (
            "corrupt",
            f"{count(integrity.corrupt_slots, 'slot')} set aside: their memory has failed a check, and is "
            "used again only after a cold start",
        )


def _disk(disk: admin_pb2.DiskStatus, worker_pid: int) -> Facts:
    """What a disk or a store holds, what it does, and what is wrong with it."""
    label = "known here" if disk.shared else "used"
    yield label, used(disk.used_bytes, disk.capacity_bytes, f", {count(disk.blocks, 'block')}")
    if disk.state != "starting" and not disk.shared:
        found = f"{count(disk.recovered_blocks, 'block')}, {human_size(disk.recovered_bytes)} found"
        yield "start", f"cold: {disk.cold_reason}" if disk.cold_reason else f"warm: {found}"
    for label, blocks, done_bytes, saved_bytes, queued_bytes, bytes_per_s in (
        (
            "written",
            disk.written_blocks,
            disk.written_bytes,
            disk.written_saved_bytes,
            disk.writing_bytes,
            disk.write_bytes_per_s,
        ),
        (
            "read",
            disk.read_blocks,
            disk.read_bytes,
            disk.read_saved_bytes,
            disk.reading_bytes,
            disk.read_bytes_per_s,
        ),
    ):
        lately = f", {human_size(bytes_per_s)}/s lately" if bytes_per_s else ""
        moved_bytes = max(1, done_bytes - saved_bytes)
        small = f", compressed to {human_size(moved_bytes)} ({done_bytes / moved_bytes:.2f} : 1)"
        yield (
            label,
            f"{blocks:,} blocks, {human_size(done_bytes)}{small * bool(saved_bytes)}, "
            f"{human_size(queued_bytes)} on their way{lately}",
        )
    yield "forgotten" if disk.shared else "evicted", f"{disk.evicted_blocks:,} blocks"
    if not disk.shared:
        yield "encryption", "AES-256-GCM" if disk.encrypted else "none"
    cached = "" if disk.direct_io or disk.shared or not worker_pid else ", without O_DIRECT"
    yield "worker", f"{f'pid {worker_pid}{cached}' if worker_pid else 'none'}, {count(disk.errors, 'error')}"
    if disk.scrubbed_blocks < disk.scrub_blocks:
        yield "scrub", scrub_line(disk)
    if disk.corrupt_blocks or disk.corrupt_slots:
        yield (
            "CORRUPT",
            f"{count(disk.corrupt_blocks, 'block')} did not match and were not served, "
            f"{count(disk.corrupt_slots, 'slot')} set aside",
        )


def _traffic(status: admin_pb2.StatusResponse) -> Facts:
    counters = status.counters
    hit_rate = counters.lookup_hits / counters.lookup_hashes if counters.lookup_hashes else 0.0
    yield (
        "lookups",
        f"{counters.lookups:,} of {counters.lookup_hashes:,} blocks, "
        f"{counters.lookup_hits:,} hit ({hit_rate:.1%})",
    )
    if status.HasField("shadow"):  # a daemon of an earlier version has none
        yield "pool sizes", sizes_line(status.shadow)
    yield (
        "stored",
        f"{counters.stored_blocks:,} blocks, {human_size(counters.stored_bytes)}"
        f" (+ {counters.deduplicated_blocks:,} there already, {counters.throttled_blocks:,} refused for lack "
        "of room" + f", {counters.unwanted_blocks:,} not worth theirs" * bool(counters.unwanted_blocks) + ")",
    )
    yield "loaded", f"{counters.loaded_blocks:,} blocks, {human_size(counters.loaded_bytes)}"
    evicted = f"{counters.evicted_blocks:,} blocks"
    if status.disks:
        evicted += f", {counters.evicted_unwritten_blocks:,} of them not written to a disk"
    yield "evicted", evicted
    if status.disks:
        yield (
            "promoted",
            f"{counters.promoted_blocks:,} blocks, {human_size(counters.promoted_bytes)}; "
            f"{counters.recompute_blocks:,} reported as misses because computing them is faster",
        )
    yield (
        "transfers",
        f"{status.transfers_active:,} active, {counters.failed_transfers:,} failed, "
        f"{counters.cancelled_transfers:,} cancelled",
    )
    yield (
        "leases",
        f"{status.leases:,} on {status.leased_blocks:,} blocks, {counters.expired_leases:,} expired",
    )
    if counters.refused_leases:
        yield (
            "",
            f"{counters.refused_leases:,} lookups found more than they could lease: "
            f"{counters.missed_lease_limit:,} blocks; the pool is small for such prompts (pool.size)",
        )
    if counters.integrity_failures:
        by = status.integrity
        yield (
            "CORRUPT",
            f"{counters.integrity_failures:,} blocks failed their check and were not served: "
            f"{by.found_on_load:,} before a load, {by.found_after_restart:,} after a restart, "
            f"{by.found_in_sample:,} by sampling",
        )
    if counters.audits:
        yield (
            "audits",
            f"{counters.audits:,} blocks computed by engines that could have loaded them: "
            f"{counters.audit_mismatches:,} were not what was stored",
        )


def _events(events: admin_pb2.EventsStatus) -> Facts:
    """What routers are told."""
    if not events.alive:
        yield "STOPPED", "nothing is published any more; the daemon's log says why"
    yield (
        "published",
        f"{events.batches:,} batches in {count(events.streams, 'topic')}: "
        f"{events.stored_blocks:,} blocks stored, {events.removed_blocks:,} removed",
    )
    if events.resets:
        yield "", f"{events.resets:,} times all of them anew, because news came too fast"
    if not events.replay_endpoint:
        yield "replays", "off"
        return
    kept = f"{events.kept_batches:,} batches kept, {human_size(events.kept_bytes)}"
    yield "replays", f"{events.replays:,}, {events.shown:,} of them with all blocks of a topic; {kept}"
    if events.replays_forgotten or events.replays_refused:
        yield (
            "",
            f"{events.replays_forgotten:,} without an end (subscribers that had gone or were too slow), "
            f"{events.replays_refused:,} refused",
        )


def _engines(status: admin_pb2.StatusResponse) -> RenderableType:
    if not status.instances:
        return Group(title("Engines", "none attached"), *map(indented, refused_imports(status)))
    return Group(title("Engines"), indented(engines(status)))


def _workers(status: admin_pb2.StatusResponse) -> RenderableType:
    workers = copy_workers(status)
    return Group(title("Copy workers"), indented(table(WORKER, workers) if workers else "none"))
