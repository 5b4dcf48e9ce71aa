"""Every metric of the daemon: its name, its labels, what it says, and what to look at it for.

Label values are a closed set: states, reasons, directions; this host's devices and disks; for one
metric, the engines attached; and, where an operator has asked for them, 64 tenants. docs/metrics.md is made
from this list by `python -m kvtierd.metrics`.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial


class MetricKind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """A number that only grows; its samples end in `_total`."""
    SUMMARY = "summary"
    """A sum and a count; its samples end in `_sum` and `_count`."""
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric."""

    kind: MetricKind
    name: str
    text: str
    """What the metric says."""
    use: str
    """What to look at the metric for, or what a value means."""
    labels: tuple[str, ...] = ()


_gauge = partial(Declared, MetricKind.GAUGE)
_counter = partial(Declared, MetricKind.COUNTER)
_summary = partial(Declared, MetricKind.SUMMARY)
_histogram = partial(Declared, MetricKind.HISTOGRAM)

DECLARED = (
    _gauge(
        "kvtier_build_info",
        "1, with the daemon's version.",
        "Which hosts have been upgraded.",
        labels=("version",),
    ),
    _gauge(
        "kvtier_uptime_seconds",
        "Seconds since the daemon started.",
        "A value that keeps falling back: the daemon is being restarted again and again.",
    ),
    _gauge(
        "kvtier_draining",
        "1 while nothing new is accepted.",
        "1 for long: somebody has drained it and forgotten it (kvtierctl resume).",
    ),
    _gauge(
        "kvtier_snapshot_fresh",
        "0 if the event loop did not answer this scrape.",
        "0: every other figure is old, and the daemon hangs or is stopped.",
    ),
    _histogram(
        "kvtier_event_loop_lag_seconds",
        "How late the event loop was at each tick: every 100 ms, or every 500 ms while idle.",
        "Lookups wait as long; high for long: the front's core is overloaded.",
    ),
    _histogram(
        "kvtier_rpc_seconds",
        "Time from a decoded request to its reply, by call; Wait and Attach are left out.",
        "What schedulers wait for in the daemon itself.",
        labels=("rpc",),
    ),
    _gauge(
        "kvtier_pool_bytes",
        "Bytes of the host pool that have memory, by whether they are in slots that hold a block.",
        "Full is healthy: what matters then is how old blocks are when they are evicted.",
        labels=("state",),
    ),
    _gauge(
        "kvtier_pool_missing_bytes",
        "Bytes of the host pool that have no memory yet, and cannot be used.",
        "Falls to 0 after a cold start; see kvtier_pool_short_bytes if it does not.",
    ),
    _gauge(
        "kvtier_pool_short_bytes",
        "Bytes of the host pool for which there is no memory, so that it stays smaller than pool.size.",
        "Not 0: something else has filled the pool's file system or the memory. Make room, then restart.",
    ),
    _gauge(
        "kvtier_pool_extents",
        "Extents of the host pool, by whether they are assigned to a slot size.",
        "None free and a new model: it takes extents from others, one by one.",
        labels=("state",),
    ),
    _gauge(
        "kvtier_slots",
        "Slots, by their size and whether they are used, free, or withheld (quarantined, corrupt).",
        "Fragmentation: free slots of one size are of no use to blocks of another.",
        labels=("slot_bytes", "state"),
    ),
    _gauge(
        "kvtier_pool_fragmented_bytes",
        "Bytes of the host pool in free slots: no use to blocks of another size.",
        "High in a pool that has no free extents: several models, one of them gone; extents follow in time.",
    ),
    _gauge(
        "kvtier_blocks",
        "Blocks in the host tier.",
        "Writing for long: stores that do not end.",
        labels=("state",),
    ),
    _gauge(
        "kvtier_blocks_max",
        "The most blocks that the block table has room for.",
        "Nearly as many blocks as this: blocks are smaller than a page of the pool.",
    ),
    _gauge(
        "kvtier_start_warm",
        "1 if the daemon started on a pool it could use.",
        "0 after a restart: its log says why the cache was lost.",
    ),
    _gauge(
        "kvtier_recovered_blocks", "Blocks found in the pool at start.", "Whether an upgrade kept the cache."
    ),
    _gauge(
        "kvtier_recovered_bytes",
        "Bytes of the blocks found in the pool at start.",
        "How much of the cache an upgrade kept.",
    ),
    _gauge("kvtier_recovery_seconds", "Seconds that opening the pool took.", "How long a restart takes."),
    _gauge(
        "kvtier_quarantined_slots",
        "Slots whose writer from before the start is not proved gone.",
        "More than 0 for minutes: a process of the predecessor hangs in the kernel.",
    ),
    _gauge(
        "kvtier_corrupt_slots",
        "Slots set aside because they have failed a check; they come back with a cold start.",
        "Rising: memory that fails; look at the host's ECC errors.",
    ),
    _gauge(
        "kvtier_discarded_slots",
        "Slots refused at start: bad checksum, missing shards.",
        "What a crash has cost.",
    ),
    _counter("kvtier_lookups", "Lookups answered.", "Load of the front."),
    _counter(
        "kvtier_index_lookups",
        "Lookups, all misses, that clients answered themselves from the index page.",
        "Of all lookups, those that cost the front nothing.",
    ),
    _counter(
        "kvtier_lookup_hashes", "Block hashes asked for in lookups.", "The other half of every hit rate."
    ),
    _counter(
        "kvtier_lookup_hits",
        "Block hashes found readable by lookups.",
        "The hit rate, of hashes asked for.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_lookup_misses",
        "Block hashes that were no hits: absent, pending (being stored or promoted), beyond (behind the "
        "first of a prefix that was none), recompute (there, but computing is faster), lease_limit "
        "(readable, but more than could be leased at once), draining, not_ready (ranks missing).",
        "Why the hit rate is what it is; kvtierctl explain says it of one block.",
        labels=("reason",),
    ),
    _gauge(
        "kvtier_shadow_hit_rate",
        "Share of looked-up blocks that half, once (now) and twice of the pool would have hit, by a sample, "
        "and what it hit of the same blocks (actual). What is an hour old weighs half. Absent until enough "
        "was seen.",
        "Whether more memory would hit more, and less would do: compare half and twice with now, and now "
        "with actual to see how good the estimate is.",
        labels=("pool",),
    ),
    _counter(
        "kvtier_store_blocks", "Blocks stored and committed.", "How much the engines write.", labels=("tier",)
    ),
    _counter(
        "kvtier_store_bytes",
        "Bytes of blocks stored and committed.",
        "How many bytes the engines write.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_load_blocks",
        "Blocks loaded into engines.",
        "What the cache saves: each is a block of a prompt that nobody computed.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_load_bytes",
        "Bytes of blocks loaded into engines.",
        "What the cache saves, in bytes; with the time, the rate of loads.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_store_deduplicated_blocks",
        "Blocks not stored: there already.",
        "Prefixes that engines share.",
    ),
    _counter(
        "kvtier_store_throttled_blocks",
        "Blocks not stored: no room.",
        "Rising: everything is held by leases and transfers; the pool is too small, or an engine keeps "
        "leases.",
    ),
    _counter(
        "kvtier_store_unwanted_blocks",
        "Blocks not stored: not worth the room of what would have had to go (pool.policy reuse).",
        "Most of what is stored, where much comes once and never again: it spares copies.",
    ),
    _counter(
        "kvtier_evicted_blocks",
        "Blocks dropped to make room.",
        "Together with their age: whether the pool is large enough.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_cleared_blocks",
        "Blocks dropped by operators (kvtierctl clear).",
        "Explains a fall of the hit rate.",
    ),
    _counter(
        "kvtier_expired_blocks",
        "Blocks dropped because the time that was given to them was over.",
        "Misses of prompts whose requests have a ttl_s.",
    ),
    _counter(
        "kvtier_unheld_blocks",
        "Blocks that were to be held for a time and are not, or not as long: no room.",
        "Rising: engines ask for more than limits.held_fraction_max of the pool, or stores found no "
        "other room.",
    ),
    _gauge(
        "kvtier_held_blocks",
        "Blocks that requests have asked to hold for a time.",
        "They are not evicted: what remains of the pool is for all others.",
    ),
    _gauge(
        "kvtier_held_bytes",
        "Bytes of the blocks that are held for a time.",
        "Near limits.held_fraction_max of the pool: further holds are not granted.",
    ),
    _summary(
        "kvtier_evicted_age_seconds",
        "How long evicted blocks had not been used.",
        "The mean is how long the cache remembers; shorter than the time between two uses of a prefix: "
        "enlarge the pool, or add a disk.",
        labels=("tier",),
    ),
    _counter(
        "kvtier_extents_reclaimed",
        "Extents taken from one slot size for another.",
        "Rising for long: two models fight for the pool.",
    ),
    _counter(
        "kvtier_transfers",
        "Transfers that ended, by how.",
        "Failed ones are misses to engines; the log says why.",
        labels=("state",),
    ),
    _summary(
        "kvtier_transfer_seconds",
        "From a store or load being accepted to its end, engines' steps included.",
        "Less the copying itself: what transfers wait for engines, and in queues.",
        labels=("direction",),
    ),
    _gauge(
        "kvtier_transfers_active", "Transfers not terminal yet.", "Rising without end: copies do not end."
    ),
    _counter(
        "kvtier_integrity_failures",
        "Blocks whose record or checksum did not match, by when that was found: before a load, before the "
        "first load after a restart, by sampling, or when a disk read them. Never served after that.",
        "Anything above 0 is failing hardware, or a bug.",
        labels=("tier", "found_by"),
    ),
    _counter(
        "kvtier_audits",
        "Blocks that engines have computed although they could be loaded, to compare the two.",
        "Whether wrong models would be found: about one in 1,000 hits, and the first after each attachment.",
    ),
    _counter(
        "kvtier_audit_mismatches",
        "Audits that found another block than the engine computes. The engine has nothing to do with that "
        "namespace any more.",
        "Anything above 0: engines share blocks that do not compute the same, and outputs may be wrong.",
    ),
    _counter(
        "kvtier_sampled_bytes",
        "Bytes of the host pool that sampling has compared.",
        "Whether rot would be found.",
    ),
    _gauge(
        "kvtier_instances",
        "Engine instances: all ranks registered, some missing, or ended and not unmapped yet.",
        "Incomplete for long: a rank of an engine has not come up.",
        labels=("state",),
    ),
    _gauge(
        "kvtier_instance_mapped_bytes",
        "Bytes of one engine's memory mapped by copy workers, by the number of the engine, 1 to 64 and more.",
        "Whose GPU memory is held: `kvtierctl engines` says which engine has which number, as long as it is "
        "attached; the next engine takes the number of one that is gone.",
        labels=("engine",),
    ),
    _gauge(
        "kvtier_tenant_bytes",
        "Bytes of each tier that a tenant's blocks take. All metrics with the label `tenant` are there only "
        "with metrics.by_tenant, for the first 64 tenants since the start; the others are summed as more.",
        "Whose blocks fill the cache.",
        labels=("tenant", "tier"),
    ),
    _gauge(
        "kvtier_tenant_blocks",
        "Blocks of a tenant.",
        "As the bytes; blocks of two models are of different sizes.",
        labels=("tenant", "tier"),
    ),
    _gauge(
        "kvtier_tenant_guaranteed_fraction",
        "The fraction of each tier that is guaranteed to a tenant now.",
        "A tenant that takes less may need less; one that takes more loses it when others want it.",
        labels=("tenant",),
    ),
    _gauge(
        "kvtier_tenant_leased_bytes",
        "Bytes of the blocks that a tenant's leases and loads hold.",
        "Who keeps others' leases small.",
        labels=("tenant",),
    ),
    _gauge(
        "kvtier_tenant_sessions",
        "Sessions of a tenant that are attached.",
        "Who has engines here.",
        labels=("tenant",),
    ),
    _counter(
        "kvtier_tenant_lookup_hashes",
        "Block hashes that a tenant's engines asked for.",
        "The other half of its hit rate.",
        labels=("tenant",),
    ),
    _counter(
        "kvtier_tenant_lookup_hits",
        "Block hashes that a tenant's engines asked for and that could be read.",
        "Whom the cache serves well, and whom not: all others are misses.",
        labels=("tenant",),
    ),
    _counter(
        "kvtier_tenant_store_bytes",
        "Bytes of blocks that a tenant has stored.",
        "Who writes most.",
        labels=("tenant",),
    ),
    _counter(
        "kvtier_tenant_load_bytes",
        "Bytes of blocks that a tenant has loaded.",
        "Who gains most.",
        labels=("tenant",),
    ),
    _counter(
        "kvtier_tenant_evicted_blocks",
        "Blocks of a tenant that the host dropped to make room, for itself or for others.",
        "Whose part is too small (server.tenant_shares).",
        labels=("tenant",),
    ),
    _gauge("kvtier_sessions", "Sessions attached.", "Near server.sessions_max: more are refused."),
    _gauge(
        "kvtier_client_mapped_bytes",
        "Bytes of engines' memory mapped by copy workers.",
        "More than 0 without engines: something is not let go.",
    ),
    _gauge("kvtier_leases", "Leases held by clients.", "Near limits.leases_max: an engine does not release."),
    _gauge(
        "kvtier_leased_blocks",
        "Blocks held by leases.",
        "How much of the pool cannot be evicted because of leases.",
    ),
    _gauge(
        "kvtier_lease_oldest_seconds",
        "Seconds since the oldest lease was granted; 0 if there is none.",
        "Longer than requests wait: an engine does not release.",
    ),
    _summary(
        "kvtier_lease_held_seconds",
        "How long leases were held, of those that ended.",
        "The mean is how long requests wait between lookup and load.",
    ),
    _counter(
        "kvtier_leases_expired",
        "Leases that ran out.",
        "Engines that hang, or queues longer than limits.lease_lifetime_s.",
    ),
    _counter(
        "kvtier_leases_refused",
        "Leases on fewer blocks than were readable, or on none.",
        "Rising: the pool is too small for the prompts (alert KvtierLeasesCut).",
    ),
    _counter("kvtier_epochs_ended", "Engine instances that ended.", "Engines that come and go."),
    _gauge(
        "kvtier_worker_live",
        "1 for a device whose copy worker is live, 0 for one that needs one; absent for GPUs not in use.",
        "0 for longer than a few seconds: nothing is copied from or to the device.",
        labels=("device",),
    ),
    _counter(
        "kvtier_worker_respawns",
        "Copy workers replaced.",
        "Rising: driver errors, or copies that hang; the log says which.",
        labels=("device",),
    ),
    _counter(
        "kvtier_imports_refused",
        "How often the driver did not let a GPU's worker open an engine's memory, by the driver's error.",
        "Above 0: engines copy through mirrors in host memory, which is slower, or not at all; kvtierctl "
        "engines says what to change.",
        labels=("device", "error"),
    ),
    _gauge(
        "kvtier_device_mapped_bytes",
        "Bytes of engines' memory mapped by the device's copy worker.",
        "Which GPU memory is held.",
        labels=("device",),
    ),
    _gauge(
        "kvtier_pool_registered_bytes",
        "Bytes of the host pool registered with the GPU's driver.",
        "How far the start has come; copies of the rest are slower, once.",
        labels=("device",),
    ),
    _gauge(
        "kvtier_pool_remote_bytes",
        "Bytes of the host pool that seem to lie on another NUMA node than the GPU; 0 with one node.",
        "Copies of these cross the processors' link.",
        labels=("device",),
    ),
    _gauge(
        "kvtier_parts_active",
        "Parts posted to copy workers and not finished.",
        "The length of the queue. If it rises without end, copies are slower than engines.",
    ),
    _counter(
        "kvtier_copy_bytes",
        "Bytes copied.",
        "Divided by kvtier_copy_seconds: the speed of copies.",
        labels=("direction",),
    ),
    _counter(
        "kvtier_copy_seconds",
        "Time spent in copies, checks included.",
        "How busy the lanes are: a lane that always copies spends 1 second per second.",
        labels=("direction",),
    ),
    _counter(
        "kvtier_parts",
        "Parts ended, by outcome.",
        "Gate deadlines: engines that do not ring.",
        labels=("direction", "outcome"),
    ),
    _gauge(
        "kvtier_disk_state",
        "1 for the state a disk is in.",
        "failing or off: lookups of blocks on this disk miss. refusing: a store is full or forbids writing; "
        "what it has is read.",
        labels=("disk", "state"),
    ),
    _gauge(
        "kvtier_disk_bytes",
        "Bytes of a disk, by whether they are in slots that hold a block.",
        "Full is healthy.",
        labels=("disk", "state"),
    ),
    _gauge(
        "kvtier_disk_queued_bytes",
        "Bytes on their way to or from a disk.",
        "At disk.write_queue_size for long: blocks are evicted before they are written.",
        labels=("disk", "direction"),
    ),
    _gauge(
        "kvtier_disk_write_budget_bytes",
        "Bytes that may be written to a disk now, by disk.write_bytes_per_s and disk.writes_per_day; absent "
        "without them.",
        "At 0 for long: what memory has no room for is lost, because the disk is to be spared.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_bytes_per_second",
        "Speed of a disk as measured lately; 0 if it has not been measured yet.",
        "A disk that gets slower.",
        labels=("disk", "direction"),
    ),
    _gauge(
        "kvtier_disk_scrub_blocks",
        "Blocks of the current scrub, or the last one: all, and those compared.",
        "How far the scrub is.",
        labels=("disk", "state"),
    ),
    _gauge("kvtier_disk_blocks", "Blocks on a disk.", "What a reboot of the host keeps.", labels=("disk",)),
    _gauge(
        "kvtier_disk_jobs",
        "Batches of blocks on their way to or from a disk.",
        "The length of the disk's queue.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_recovered_blocks",
        "Blocks found on a disk at start.",
        "Whether a restart kept them.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_recovered_bytes",
        "Bytes of the blocks found on a disk at start.",
        "How much a restart kept.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_recovery_seconds",
        "Seconds that reading a disk's records took at start.",
        "How long a restart takes.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_direct_io",
        "1 if a disk is used without the kernel's cache (O_DIRECT).",
        "0: the file system has no O_DIRECT, and blocks are in memory twice.",
        labels=("disk",),
    ),
    _gauge(
        "kvtier_disk_corrupt_slots",
        "Slots set aside after a failed check.",
        "Rising: the disk fails.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_written_blocks",
        "Blocks written to a disk.",
        "How much a disk is worn by blocks.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_written_bytes",
        "Bytes of the blocks written to a disk.",
        "Wear, against what the disk is made for.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_read_blocks",
        "Blocks read from a disk.",
        "What the disk tier saves: each is a block of a prompt that nobody computed.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_read_bytes",
        "Bytes of the blocks read from a disk.",
        "What the disk tier saves, in bytes.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_reads",
        "Reads from a disk that brought blocks into memory, each of them several blocks of one prompt.",
        "With kvtier_disk_read_seconds: how long a load from this tier takes.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_read_seconds",
        "Seconds that these reads took, from when a lookup had them begun until their blocks could be "
        "loaded.",
        "Divided by kvtier_disk_reads: how much later than from memory a prompt begins. The load from memory "
        "itself is in kvtier_transfer_seconds.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_store_transferred_bytes",
        "Bytes of blocks that went to the store that hosts share, or came from it, as it has them; only "
        "with store.url.",
        "What its network carries. kvtier_disk_written_bytes and kvtier_disk_read_bytes of the same disk, "
        "divided by it: what store.compression gains.",
        labels=("disk", "direction"),
    ),
    _counter(
        "kvtier_disk_evicted_blocks",
        "Blocks dropped to make room on a disk.",
        "Whether the disk is large enough.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_errors",
        "Jobs of a disk that failed, or were too slow.",
        "Rising: look at the disk's state (kvtier_disk_state), and at the log.",
        labels=("disk",),
    ),
    _counter(
        "kvtier_disk_corrupt_blocks",
        "Blocks that did not match when they were read or checked. Never served.",
        "Anything above 0: the disk fails.",
        labels=("disk",),
    ),
    _counter("kvtier_promoted_blocks", "Blocks read from a disk to the host.", "Hits of the disk tier."),
    _counter(
        "kvtier_promoted_bytes",
        "Bytes of the blocks read from a disk to the host.",
        "Bytes of the hits of the disk tier.",
    ),
    _counter(
        "kvtier_recompute_blocks",
        "Blocks reported as misses because computing them is faster than loading them.",
        "High: the disks are slower than the GPUs.",
    ),
    _counter(
        "kvtier_evicted_unwritten_blocks",
        "Blocks evicted from the host before a disk had them, which it should have had.",
        "Rising: the disks are too slow for what is stored.",
    ),
    _gauge(
        "kvtier_events_alive",
        "1 while KV events are published, 0 if that has ended with an error. These metrics are there only "
        "with events.endpoint.",
        "0: routers go by what they knew; the log says why.",
    ),
    _gauge(
        "kvtier_event_topics", "Topics of KV events, one for each namespace.", "How many models there are."
    ),
    _counter("kvtier_event_batches", "Batches of KV events published.", "What routers have to read."),
    _counter(
        "kvtier_event_blocks",
        "Blocks told of to routers, as stored or as removed; each medium counts by itself.",
        "What routers have to read.",
        labels=("kind",),
    ),
    _counter(
        "kvtier_event_resets",
        "How often all blocks were told of anew, because news came faster than they could be published.",
        "Rising: the host is short of processor time.",
    ),
    _counter(
        "kvtier_event_replays",
        "Requests for replays: answered; forgotten before their end, as the subscriber was gone or too slow; "
        "refused.",
        "Rising: subscribers lose batches (events.subscriber_queue), or cannot keep up.",
        labels=("outcome",),
    ),
    _counter(
        "kvtier_event_topics_shown",
        "How often a replay needed all blocks of a topic, because the batches asked for were gone.",
        "Rising without new routers: keep more (events.replay_batches, events.replay_size).",
    ),
    _gauge(
        "kvtier_event_kept_batches", "Batches kept for replays.", "At events.replay_batches: all are used."
    ),
    _gauge("kvtier_event_kept_bytes", "Bytes kept for replays.", "At events.replay_size: all are used."),
)

BY_NAME = {declared.name: declared for declared in DECLARED}


def as_markdown() -> str:
    """The list of all metrics as a Markdown table."""
    lines = ["| metric | labels | says | look at it for |", "|---|---|---|---|"]
    for each in DECLARED:
        suffix = {
            MetricKind.COUNTER: "_total",
            MetricKind.SUMMARY: "_sum, _count",
            MetricKind.HISTOGRAM: "_bucket, …",
        }
        name = f"`{each.name}`" + (f" {suffix[each.kind]}" if each.kind in suffix else "")
        lines.append(f"| {name} | {', '.join(each.labels)} | {each.text} | {each.use} |")
    return "\n".join(lines) + "\n"
