"""Turns a snapshot of the cache into families of Prometheus metrics."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.core import Metric

from kvtierd.cache import CPU, EventsSnapshot, Snapshot
from kvtierd.metrics.sheet import Sheet

TIER = "host"
DISK_PREFIX = "disk-"
"""Begins the names of devices that are disks."""
DISK_STATES = ("starting", "live", "refusing", "off", "failing")
INSTANCES_SHOWN_MAX = 64
TENANTS_SHOWN_MAX = 64
SIZES_SHOWN_MAX = 32
"""Slot sizes follow from engines' layouts, so there may be many. Those beyond this number are summed."""
MORE = "more"
"""The label value of everything that is not shown one by one."""


def families(snapshot: Snapshot, version: str, *, by_tenant: bool = False) -> Iterator[Metric]:
    """Yields every family that can be read from a snapshot; those with tenants' names only if asked."""
    sheet = Sheet()
    sheet.set("kvtier_build_info", 1, version)
    sheet.set("kvtier_uptime_seconds", snapshot.uptime_s)
    sheet.set("kvtier_draining", snapshot.state == "draining")
    _pool(sheet, snapshot)
    _traffic(sheet, snapshot)
    _integrity(sheet, snapshot)
    _clients(sheet, snapshot)
    _workers(sheet, snapshot)
    if by_tenant:
        _tenants(sheet, snapshot)
    if snapshot.disks:
        _disks(sheet, snapshot)
        _promotion(sheet, snapshot)
    if snapshot.events is not None:
        _events(sheet, snapshot.events)
    yield from sheet


def _pool(sheet: Sheet, snapshot: Snapshot) -> None:
    pool, core = snapshot.pool, snapshot.core
    sheet.set("kvtier_pool_bytes", core.used_bytes, "used")
    sheet.set("kvtier_pool_bytes", pool.populated_bytes - core.used_bytes, "free")
    missing_bytes = pool.capacity_bytes - pool.populated_bytes
    sheet.set("kvtier_pool_missing_bytes", missing_bytes)
    sheet.set("kvtier_pool_short_bytes", missing_bytes if pool.shortage else 0)
    sheet.set("kvtier_pool_extents", core.extents - core.extents_free, "assigned")
    sheet.set("kvtier_pool_extents", core.extents_free, "free")
    free_bytes = sum(size.free * size.slot_bytes for size in core.sizes)
    sheet.set("kvtier_pool_fragmented_bytes", free_bytes)
    _slots(sheet, snapshot)
    sheet.set("kvtier_blocks", core.blocks.writing, "writing")
    sheet.set("kvtier_blocks", core.blocks.ready, "ready")
    sheet.set("kvtier_blocks", core.blocks.evicting, "evicting")
    sheet.set("kvtier_blocks_max", core.blocks.capacity)
    sheet.set("kvtier_start_warm", pool.start.warm)
    sheet.set("kvtier_recovered_blocks", pool.start.recovered_blocks)
    sheet.set("kvtier_recovered_bytes", pool.start.recovered_bytes)
    sheet.set("kvtier_recovery_seconds", pool.start.seconds)
    sheet.set("kvtier_quarantined_slots", pool.quarantined_slots)
    sheet.set("kvtier_corrupt_slots", core.corrupt_slots)
    sheet.set("kvtier_discarded_slots", pool.start.discarded_slots)


def _slots(sheet: Sheet, snapshot: Snapshot) -> None:
    by_extents = sorted(snapshot.core.sizes, key=lambda size: size.extents, reverse=True)
    slots: Counter[tuple[str, str]] = Counter()
    for index, size in enumerate(by_extents):
        name = str(size.slot_bytes) if index < SIZES_SHOWN_MAX else MORE
        slots[name, "used"] += size.slots - size.free - size.withheld
        slots[name, "free"] += size.free
        slots[name, "withheld"] += size.withheld
    for labels, count in slots.items():
        sheet.set("kvtier_slots", count, *labels)


def _traffic(sheet: Sheet, snapshot: Snapshot) -> None:
    counters = snapshot.core.counters
    sheet.set("kvtier_lookups", counters.lookups)
    sheet.set("kvtier_index_lookups", counters.index_lookups)
    sheet.set("kvtier_lookup_hashes", counters.lookup_hashes)
    sheet.set("kvtier_lookup_hits", counters.lookup_hits, TIER)
    for reason in ("absent", "pending", "beyond", "recompute", "lease_limit", "draining", "not_ready"):
        sheet.set("kvtier_lookup_misses", getattr(counters, f"missed_{reason}"), reason)
    shadow = snapshot.core.shadow
    if shadow.known:
        for pool in ("half", "now", "twice", "actual"):
            sheet.set("kvtier_shadow_hit_rate", getattr(shadow, pool), pool)
    sheet.set("kvtier_store_blocks", counters.stored_blocks, TIER)
    sheet.set("kvtier_store_bytes", counters.stored_bytes, TIER)
    sheet.set("kvtier_load_blocks", counters.loaded_blocks, TIER)
    sheet.set("kvtier_load_bytes", counters.loaded_bytes, TIER)
    sheet.set("kvtier_store_deduplicated_blocks", counters.deduplicated_blocks)
    sheet.set("kvtier_store_throttled_blocks", counters.throttled_blocks)
    sheet.set("kvtier_store_unwanted_blocks", counters.unwanted_blocks)
    sheet.set("kvtier_evicted_blocks", counters.evicted_blocks, TIER)
    sheet.set("kvtier_cleared_blocks", counters.cleared_blocks)
    sheet.set("kvtier_expired_blocks", counters.expired_blocks)
    sheet.set("kvtier_unheld_blocks", counters.unheld_blocks)
    sheet.set("kvtier_held_blocks", snapshot.core.held_blocks)
    sheet.set("kvtier_held_bytes", snapshot.core.held_bytes)
    sheet.summary("kvtier_evicted_age_seconds", counters.evicted_blocks, counters.evicted_age_s, TIER)
    sheet.set("kvtier_extents_reclaimed", counters.reclaimed_extents)
    sheet.set("kvtier_transfers", counters.done_transfers, "done")
    sheet.set("kvtier_transfers", counters.failed_transfers, "failed")
    sheet.set("kvtier_transfers", counters.cancelled_transfers, "cancelled")
    took = "kvtier_transfer_seconds"
    sheet.summary(took, counters.store_transfers, counters.store_transfer_s, "store")
    sheet.summary(took, counters.load_transfers, counters.load_transfer_s, "load")
    sheet.set("kvtier_transfers_active", snapshot.core.transfers_active)


def _integrity(sheet: Sheet, snapshot: Snapshot) -> None:
    counters = snapshot.core.counters
    sheet.set("kvtier_integrity_failures", counters.corrupt_on_load, TIER, "load")
    sheet.set("kvtier_integrity_failures", counters.corrupt_after_restart, TIER, "restart")
    sheet.set("kvtier_integrity_failures", counters.corrupt_in_sample, TIER, "sample")
    if snapshot.disks:
        sheet.set("kvtier_integrity_failures", counters.corrupt_on_disk, "disk", "read")
    sheet.set("kvtier_sampled_bytes", counters.sampled_bytes)
    sheet.set("kvtier_audits", counters.audits)
    sheet.set("kvtier_audit_mismatches", counters.audit_mismatches)


def _clients(sheet: Sheet, snapshot: Snapshot) -> None:
    core = snapshot.core
    ending = sum(instance.fencing for instance in core.instances)
    ready = sum(instance.ready and not instance.fencing for instance in core.instances)
    sheet.set("kvtier_instances", ready, "ready")
    sheet.set("kvtier_instances", len(core.instances) - ready - ending, "incomplete")
    sheet.set("kvtier_instances", ending, "ending")
    mapped: Counter[str] = Counter()
    for instance in core.instances:  # an ending instance and its successor may have the same number
        name = str(instance.number) if instance.number <= INSTANCES_SHOWN_MAX else MORE
        mapped[name] += instance.mapped_bytes
    for name, mapped_bytes in mapped.items():
        sheet.set("kvtier_instance_mapped_bytes", mapped_bytes, name)
    sheet.set("kvtier_sessions", len(snapshot.sessions))
    sheet.set("kvtier_client_mapped_bytes", mapped.total())
    sheet.set("kvtier_leases", core.leases)
    sheet.set("kvtier_leased_blocks", core.leased_blocks)
    sheet.set("kvtier_lease_oldest_seconds", core.lease_oldest_s)
    counters = core.counters
    sheet.summary("kvtier_lease_held_seconds", counters.ended_leases, counters.lease_held_s)
    sheet.set("kvtier_leases_expired", counters.expired_leases)
    sheet.set("kvtier_leases_refused", counters.refused_leases)
    sheet.set("kvtier_epochs_ended", counters.ended_epochs)


def _tenants(sheet: Sheet, snapshot: Snapshot) -> None:
    """Fills the families that say what each tenant has and does. The first ones keep their label while the
    daemon runs; those that come later are summed."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    tenants = snapshot.core.tenants
    for index, each in enumerate(tenants):
        name = (each.name or f"tag:{each.tag:08x}") if index < TENANTS_SHOWN_MAX else MORE
        counters = each.counters
        for metric, value, *labels in (
            ("kvtier_tenant_bytes", each.host_bytes, TIER),
            ("kvtier_tenant_blocks", each.host_blocks, TIER),
            ("kvtier_tenant_guaranteed_fraction", each.guaranteed_fraction),
            ("kvtier_tenant_leased_bytes", each.leased_bytes),
            ("kvtier_tenant_sessions", each.sessions),
            ("kvtier_tenant_lookup_hashes", counters.lookup_hashes),
            ("kvtier_tenant_lookup_hits", counters.lookup_hits),
            ("kvtier_tenant_store_bytes", counters.stored_bytes),
            ("kvtier_tenant_load_bytes", counters.loaded_bytes),
            ("kvtier_tenant_evicted_blocks", counters.evicted_blocks),
        ):
            sums[metric, name, *labels] += value
        if snapshot.disks:
            sums["kvtier_tenant_bytes", name, "disk"] += each.disk_bytes
            sums["kvtier_tenant_blocks", name, "disk"] += each.disk_blocks
    for (metric, *labels), value in sums.items():
        sheet.set(metric, value, *labels)


def _workers(sheet: Sheet, snapshot: Snapshot) -> None:
    for device in snapshot.devices:
        workers = [worker for worker in snapshot.workers if worker.device == device.name]
        if not device.idle:
            live = any(worker.state == "live" for worker in workers)
            sheet.set("kvtier_worker_live", live, device.name)
        sheet.set("kvtier_worker_respawns", device.respawns, device.name)
        if device.name.startswith(DISK_PREFIX):
            continue
        mapped_bytes = sum(worker.mapped_bytes for worker in workers)
        sheet.set("kvtier_device_mapped_bytes", mapped_bytes, device.name)
        if device.name != CPU:
            registered_bytes = sum(worker.registered_bytes for worker in workers)
            remote_bytes = max((worker.remote_bytes for worker in workers), default=0)
            sheet.set("kvtier_pool_registered_bytes", registered_bytes, device.name)
            sheet.set("kvtier_pool_remote_bytes", remote_bytes, device.name)
            for error, count in device.refused_imports.items():
                sheet.set("kvtier_imports_refused", count, device.name, error)
    copying = [worker for worker in snapshot.workers if not worker.device.startswith(DISK_PREFIX)]
    sheet.set("kvtier_parts_active", sum(worker.parts_active for worker in copying))
    for direction, totals in snapshot.copies.items():
        sheet.set("kvtier_copy_bytes", totals.copied_bytes, direction)
        sheet.set("kvtier_copy_seconds", totals.copy_s, direction)
        for outcome, count in totals.outcomes.items():
            sheet.set("kvtier_parts", count, direction, outcome.lower())


def _disks(sheet: Sheet, snapshot: Snapshot) -> None:
    """Fills the families of the disk tier, labelled with the path of the disk."""
    for disk in snapshot.disks:
        core, path, counters = disk.core, disk.path, disk.core.counters
        for name in DISK_STATES:
            sheet.set("kvtier_disk_state", name == disk.state, path, name)
        sheet.set("kvtier_disk_bytes", core.used_bytes, path, "used")
        sheet.set("kvtier_disk_bytes", disk.capacity_bytes - core.used_bytes, path, "free")
        sheet.set("kvtier_disk_queued_bytes", core.writing_bytes, path, "write")
        sheet.set("kvtier_disk_queued_bytes", core.reading_bytes, path, "read")
        if core.write_budget_bytes is not None:
            sheet.set("kvtier_disk_write_budget_bytes", core.write_budget_bytes, path)
        sheet.set("kvtier_disk_bytes_per_second", core.write_bytes_per_s, path, "write")
        sheet.set("kvtier_disk_bytes_per_second", core.read_bytes_per_s, path, "read")
        sheet.set("kvtier_disk_scrub_blocks", core.scrub_blocks, path, "all")
        sheet.set("kvtier_disk_scrub_blocks", core.scrubbed_blocks, path, "done")
        sheet.set("kvtier_disk_blocks", core.blocks, path)
        sheet.set("kvtier_disk_jobs", core.jobs, path)
        sheet.set("kvtier_disk_recovered_blocks", disk.recovered_blocks, path)
        sheet.set("kvtier_disk_recovered_bytes", disk.recovered_bytes, path)
        sheet.set("kvtier_disk_recovery_seconds", disk.recovery_s, path)
        sheet.set("kvtier_disk_direct_io", disk.direct_io, path)
        sheet.set("kvtier_disk_corrupt_slots", core.corrupt_slots, path)
        sheet.set("kvtier_disk_written_blocks", counters.written_blocks, path)
        sheet.set("kvtier_disk_written_bytes", counters.written_bytes, path)
        if disk.shared:
            put_bytes = counters.written_bytes - counters.written_saved_bytes
            got_bytes = counters.read_bytes - counters.read_saved_bytes
            sheet.set("kvtier_store_transferred_bytes", put_bytes, path, "write")
            sheet.set("kvtier_store_transferred_bytes", got_bytes, path, "read")
        sheet.set("kvtier_disk_read_blocks", counters.read_blocks, path)
        sheet.set("kvtier_disk_read_bytes", counters.read_bytes, path)
        sheet.set("kvtier_disk_reads", counters.reads, path)
        sheet.set("kvtier_disk_read_seconds", counters.read_s, path)
        sheet.set("kvtier_disk_evicted_blocks", counters.evicted_blocks, path)
        sheet.set("kvtier_disk_errors", counters.errors, path)
        sheet.set("kvtier_disk_corrupt_blocks", counters.corrupt_blocks, path)


def _promotion(sheet: Sheet, snapshot: Snapshot) -> None:
    counters = snapshot.core.counters
    sheet.set("kvtier_promoted_blocks", counters.promoted_blocks)
    sheet.set("kvtier_promoted_bytes", counters.promoted_bytes)
    sheet.set("kvtier_recompute_blocks", counters.recompute_blocks)
    sheet.set("kvtier_evicted_unwritten_blocks", counters.evicted_unwritten_blocks)


def _events(sheet: Sheet, events: EventsSnapshot) -> None:
    sheet.set("kvtier_events_alive", events.alive)
    sheet.set("kvtier_event_topics", events.streams)
    sheet.set("kvtier_event_batches", events.batches)
    sheet.set("kvtier_event_blocks", events.stored_blocks, "stored")
    sheet.set("kvtier_event_blocks", events.removed_blocks, "removed")
    sheet.set("kvtier_event_resets", events.resets)
    sheet.set("kvtier_event_replays", events.replays - events.replays_forgotten, "answered")
    sheet.set("kvtier_event_replays", events.replays_forgotten, "forgotten")
    sheet.set("kvtier_event_replays", events.replays_refused, "refused")
    sheet.set("kvtier_event_topics_shown", events.shown)
    sheet.set("kvtier_event_kept_batches", events.kept_batches)
    sheet.set("kvtier_event_kept_bytes", events.kept_bytes)
