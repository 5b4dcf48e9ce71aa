"""Every metric of the daemon: its name, its labels, what it says, and what to look at it for.

Label values are a closed set: states, reasons, directions; this host's devices and disks; and, for one
metric, the engines attached. docs/metrics.md is made from this list by `python -m kvtierd.metrics`.
"""

from dataclasses import dataclass
from enum import Enum


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
    labels: tuple[str, ...]
    text: str
    """What the metric says."""
    use: str
    """What to look at the metric for, or what a value means."""


_G, _C, _S, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.SUMMARY, MetricKind.HISTOGRAM

DECLARED = (
    Declared(
        _G,
        "kvtier_build_info",
        ("version",),
        "1, with the daemon's version.",
        "Which hosts have been upgraded.",
    ),
    Declared(
        _G,
        "kvtier_uptime_seconds",
        (),
        "Seconds since the daemon started.",
        "A value that keeps falling back: the daemon is being restarted again and again.",
    ),
    Declared(
        _G,
        "kvtier_draining",
        (),
        "1 while nothing new is accepted.",
        "1 for long: somebody has drained it and forgotten it (kvtierctl resume).",
    ),
    Declared(
        _G,
        "kvtier_snapshot_fresh",
        (),
        "0 if the event loop did not answer this scrape.",
        "0: every other figure is old, and the daemon hangs or is stopped.",
    ),
    Declared(
        _H,
        "kvtier_event_loop_lag_seconds",
        (),
        "How late the event loop was at each tick of 100 ms.",
        "Lookups wait as long; high for long: the front's core is overloaded.",
    ),
    Declared(
        _H,
        "kvtier_rpc_seconds",
        ("rpc",),
        "Time from a decoded request to its reply, by call; Wait and Attach are left out.",
        "What schedulers wait for in the daemon itself.",
    ),
    Declared(
        _G,
        "kvtier_pool_bytes",
        ("state",),
        "Bytes of the host pool, by whether they are in slots that hold a block.",
        "Full is healthy: what matters then is how old blocks are when they are evicted.",
    ),
    Declared(
        _G,
        "kvtier_pool_extents",
        ("state",),
        "Extents of the host pool, by whether they are assigned to a slot size.",
        "None free and a new model: it takes extents from others, one by one.",
    ),
    Declared(
        _G,
        "kvtier_slots",
        ("slot_bytes", "state"),
        "Slots, by their size and whether they are used, free, or withheld (quarantined, corrupt).",
        "Fragmentation: free slots of one size are of no use to blocks of another.",
    ),
    Declared(
        _G,
        "kvtier_pool_fragmented_bytes",
        (),
        "Bytes of the host pool in free slots: no use to blocks of another size.",
        "High in a pool that has no free extents: several models, one of them gone; extents follow in time.",
    ),
    Declared(
        _G,
        "kvtier_blocks",
        ("state",),
        "Blocks in the host tier.",
        "Writing for long: stores that do not end.",
    ),
    Declared(
        _G,
        "kvtier_blocks_max",
        (),
        "The most blocks that the block table has room for.",
        "Nearly as many blocks as this: blocks are smaller than a page of the pool.",
    ),
    Declared(
        _G,
        "kvtier_start_warm",
        (),
        "1 if the daemon started on a pool it could use.",
        "0 after a restart: its log says why the cache was lost.",
    ),
    Declared(
        _G,
        "kvtier_recovered_blocks",
        (),
        "Blocks found in the pool at start.",
        "Whether an upgrade kept the cache.",
    ),
    Declared(
        _G,
        "kvtier_recovered_bytes",
        (),
        "Bytes of the blocks found in the pool at start.",
        "How much of the cache an upgrade kept.",
    ),
    Declared(
        _G,
        "kvtier_recovery_seconds",
        (),
        "Seconds that opening the pool took.",
        "How long a restart takes.",
    ),
    Declared(
        _G,
        "kvtier_quarantined_slots",
        (),
        "Slots whose writer from before the start is not proved gone.",
        "More than 0 for minutes: a process of the predecessor hangs in the kernel.",
    ),
    Declared(
        _G,
        "kvtier_corrupt_slots",
        (),
        "Slots set aside because they have failed a check; they come back with a cold start.",
        "Rising: memory that fails; look at the host's ECC errors.",
    ),
    Declared(
        _G,
        "kvtier_discarded_slots",
        (),
        "Slots refused at start: bad checksum, missing shards.",
        "What a crash has cost.",
    ),
    Declared(
        _C,
        "kvtier_lookups",
        (),
        "Lookups answered.",
        "Load of the front.",
    ),
    Declared(
        _C,
        "kvtier_index_lookups",
        (),
        "Lookups, all misses, that clients answered themselves from the index page.",
        "Of all lookups, those that cost the front nothing.",
    ),
    Declared(
        _C,
        "kvtier_lookup_hashes",
        (),
        "Block hashes asked for in lookups.",
        "The other half of every hit rate.",
    ),
    Declared(
        _C,
        "kvtier_lookup_hits",
        ("tier",),
        "Block hashes found readable by lookups.",
        "The hit rate, of hashes asked for.",
    ),
    Declared(
        _C,
        "kvtier_lookup_misses",
        ("reason",),
        "Block hashes that were no hits: absent, pending (being stored or promoted), beyond (behind the "
        "first of a prefix that was none), recompute (there, but computing is faster), lease_limit "
        "(readable, but more than could be leased at once), draining, not_ready (ranks missing).",
        "Why the hit rate is what it is; kvtierctl explain says it of one block.",
    ),
    Declared(
        _C,
        "kvtier_store_blocks",
        ("tier",),
        "Blocks stored and committed.",
        "How much the engines write.",
    ),
    Declared(
        _C,
        "kvtier_store_bytes",
        ("tier",),
        "Bytes of blocks stored and committed.",
        "How many bytes the engines write.",
    ),
    Declared(
        _C,
        "kvtier_load_blocks",
        ("tier",),
        "Blocks loaded into engines.",
        "What the cache saves: each is a block of a prompt that nobody computed.",
    ),
    Declared(
        _C,
        "kvtier_load_bytes",
        ("tier",),
        "Bytes of blocks loaded into engines.",
        "What the cache saves, in bytes; with the time, the rate of loads.",
    ),
    Declared(
        _C,
        "kvtier_store_deduplicated_blocks",
        (),
        "Blocks not stored: there already.",
        "Prefixes that engines share.",
    ),
    Declared(
        _C,
        "kvtier_store_throttled_blocks",
        (),
        "Blocks not stored: no room.",
        "Rising: everything is held by leases and transfers; the pool is too small, or an engine keeps "
        "leases.",
    ),
    Declared(
        _C,
        "kvtier_evicted_blocks",
        ("tier",),
        "Blocks dropped to make room.",
        "Together with their age: whether the pool is large enough.",
    ),
    Declared(
        _C,
        "kvtier_cleared_blocks",
        (),
        "Blocks dropped by operators (kvtierctl clear).",
        "Explains a fall of the hit rate.",
    ),
    Declared(
        _C,
        "kvtier_expired_blocks",
        (),
        "Blocks dropped because the time that was given to them was over.",
        "Misses of prompts whose requests have a ttl_s.",
    ),
    Declared(
        _C,
        "kvtier_unheld_blocks",
        (),
        "Blocks that were to be held for a time and are not, or not as long: no room.",
        "Rising: engines wish for more than limits.held_fraction_max of the pool, or stores found no "
        "other room.",
    ),
    Declared(
        _G,
        "kvtier_held_blocks",
        (),
        "Blocks that requests have asked to hold for a time.",
        "They are not evicted: what remains of the pool is for all others.",
    ),
    Declared(
        _G,
        "kvtier_held_bytes",
        (),
        "Bytes of the blocks that are held for a time.",
        "Near limits.held_fraction_max of the pool: further wishes are not granted.",
    ),
    Declared(
        _S,
        "kvtier_evicted_age_seconds",
        ("tier",),
        "How long evicted blocks had not been used.",
        "The mean is how long the cache remembers; shorter than the time between two uses of a prefix: "
        "enlarge the pool, or add a disk.",
    ),
    Declared(
        _C,
        "kvtier_extents_reclaimed",
        (),
        "Extents taken from one slot size for another.",
        "Rising for long: two models fight for the pool.",
    ),
    Declared(
        _C,
        "kvtier_transfers",
        ("state",),
        "Transfers that ended, by how.",
        "Failed ones are misses to engines; the log says why.",
    ),
    Declared(
        _S,
        "kvtier_transfer_seconds",
        ("direction",),
        "From a store or load being accepted to its end, engines' steps included.",
        "Less the copying itself: what transfers wait for engines, and in queues.",
    ),
    Declared(
        _G,
        "kvtier_transfers_active",
        (),
        "Transfers not terminal yet.",
        "Rising without end: copies do not end.",
    ),
    Declared(
        _C,
        "kvtier_integrity_failures",
        ("tier", "found_by"),
        "Blocks whose record or checksum did not match, by when that was found: before a load, before the "
        "first load after a restart, by sampling, or when a disk read them. Never served after that.",
        "Anything above 0 is failing hardware, or a bug.",
    ),
    Declared(
        _C,
        "kvtier_audits",
        (),
        "Blocks that engines have computed although they could be loaded, to compare the two.",
        "Whether wrong models would be found: about one in 1,000 hits, and the first after each attachment.",
    ),
    Declared(
        _C,
        "kvtier_audit_mismatches",
        (),
        "Audits that found another block than the engine computes. The engine has nothing to do with that "
        "namespace any more.",
        "Anything above 0: engines share blocks that do not compute the same, and outputs may be wrong.",
    ),
    Declared(
        _C,
        "kvtier_sampled_bytes",
        (),
        "Bytes of the host pool that sampling has compared.",
        "Whether rot would be found.",
    ),
    Declared(
        _G,
        "kvtier_instances",
        ("state",),
        "Engine instances: all ranks registered, some missing, or ended and not unmapped yet.",
        "Incomplete for long: a rank of an engine has not come up.",
    ),
    Declared(
        _G,
        "kvtier_instance_mapped_bytes",
        ("engine",),
        "Bytes of one engine's memory mapped by copy workers, by the number of the engine, 1 to 64 and more.",
        "Whose GPU memory is held: `kvtierctl engines` says which engine has which number, as long as it is "
        "attached; the next engine takes the number of one that is gone.",
    ),
    Declared(
        _G,
        "kvtier_sessions",
        (),
        "Sessions attached.",
        "Near server.sessions_max: more are refused.",
    ),
    Declared(
        _G,
        "kvtier_client_mapped_bytes",
        (),
        "Bytes of engines' memory mapped by copy workers.",
        "More than 0 without engines: something is not let go.",
    ),
    Declared(
        _G,
        "kvtier_leases",
        (),
        "Leases held by clients.",
        "Near limits.leases_max: an engine does not release.",
    ),
    Declared(
        _G,
        "kvtier_leased_blocks",
        (),
        "Blocks held by leases.",
        "How much of the pool cannot be evicted because of leases.",
    ),
    Declared(
        _G,
        "kvtier_lease_oldest_seconds",
        (),
        "Seconds since the oldest lease was granted; 0 if there is none.",
        "Longer than requests wait: an engine does not release.",
    ),
    Declared(
        _S,
        "kvtier_lease_held_seconds",
        (),
        "How long leases were held, of those that ended.",
        "The mean is how long requests wait between lookup and load.",
    ),
    Declared(
        _C,
        "kvtier_leases_expired",
        (),
        "Leases that ran out.",
        "Engines that hang, or queues longer than limits.lease_lifetime_s.",
    ),
    Declared(
        _C,
        "kvtier_leases_refused",
        (),
        "Leases on fewer blocks than were readable, or on none.",
        "Rising: the pool is too small for the prompts (alert KvtierLeasesCut).",
    ),
    Declared(
        _C,
        "kvtier_epochs_ended",
        (),
        "Engine instances that ended.",
        "Engines that come and go.",
    ),
    Declared(
        _G,
        "kvtier_worker_live",
        ("device",),
        "1 for a device whose copy worker is live, 0 for one that needs one; absent for GPUs not in use.",
        "0 for longer than a few seconds: nothing is copied from or to the device.",
    ),
    Declared(
        _C,
        "kvtier_worker_respawns",
        ("device",),
        "Copy workers replaced.",
        "Rising: driver errors, or copies that hang; the log says which.",
    ),
    Declared(
        _G,
        "kvtier_device_mapped_bytes",
        ("device",),
        "Bytes of engines' memory mapped by the device's copy worker.",
        "Which GPU memory is held.",
    ),
    Declared(
        _G,
        "kvtier_pool_registered_bytes",
        ("device",),
        "Bytes of the host pool registered with the GPU's driver.",
        "How far the start has come; copies of the rest are slower, once.",
    ),
    Declared(
        _G,
        "kvtier_pool_remote_bytes",
        ("device",),
        "Bytes of the host pool that seem to lie on another NUMA node than the GPU; 0 with one node.",
        "Copies of these cross the processors' link.",
    ),
    Declared(
        _G,
        "kvtier_parts_active",
        (),
        "Parts posted to copy workers and not finished.",
        "The length of the queue. If it rises without end, copies are slower than engines.",
    ),
    Declared(
        _C,
        "kvtier_copy_bytes",
        ("direction",),
        "Bytes copied.",
        "Divided by kvtier_copy_seconds: the speed of copies.",
    ),
    Declared(
        _C,
        "kvtier_copy_seconds",
        ("direction",),
        "Time spent in copies, checks included.",
        "How busy the lanes are: a lane that always copies spends 1 second per second.",
    ),
    Declared(
        _C,
        "kvtier_parts",
        ("direction", "outcome"),
        "Parts ended, by outcome.",
        "Gate deadlines: engines that do not ring.",
    ),
    Declared(
        _G,
        "kvtier_disk_state",
        ("disk", "state"),
        "1 for the state a disk is in.",
        "failing or off: lookups of blocks on this disk miss.",
    ),
    Declared(
        _G,
        "kvtier_disk_bytes",
        ("disk", "state"),
        "Bytes of a disk, by whether they are in slots that hold a block.",
        "Full is healthy.",
    ),
    Declared(
        _G,
        "kvtier_disk_queued_bytes",
        ("disk", "direction"),
        "Bytes on their way to or from a disk.",
        "At disk.write_queue_size for long: blocks are evicted before they are written.",
    ),
    Declared(
        _G,
        "kvtier_disk_bytes_per_second",
        ("disk", "direction"),
        "Speed of a disk as measured lately; 0 if it has not been measured yet.",
        "A disk that gets slower.",
    ),
    Declared(
        _G,
        "kvtier_disk_scrub_blocks",
        ("disk", "state"),
        "Blocks of the current scrub, or the last one: all, and those compared.",
        "How far the scrub is.",
    ),
    Declared(
        _G,
        "kvtier_disk_blocks",
        ("disk",),
        "Blocks on a disk.",
        "What a reboot of the host keeps.",
    ),
    Declared(
        _G,
        "kvtier_disk_jobs",
        ("disk",),
        "Batches of blocks on their way to or from a disk.",
        "The length of the disk's queue.",
    ),
    Declared(
        _G,
        "kvtier_disk_recovered_blocks",
        ("disk",),
        "Blocks found on a disk at start.",
        "Whether a restart kept them.",
    ),
    Declared(
        _G,
        "kvtier_disk_recovered_bytes",
        ("disk",),
        "Bytes of the blocks found on a disk at start.",
        "How much a restart kept.",
    ),
    Declared(
        _G,
        "kvtier_disk_recovery_seconds",
        ("disk",),
        "Seconds that reading a disk's records took at start.",
        "How long a restart takes.",
    ),
    Declared(
        _G,
        "kvtier_disk_direct_io",
        ("disk",),
        "1 if a disk is used without the kernel's cache (O_DIRECT).",
        "0: the file system has no O_DIRECT, and blocks are in memory twice.",
    ),
    Declared(
        _G,
        "kvtier_disk_corrupt_slots",
        ("disk",),
        "Slots set aside after a failed check.",
        "Rising: the disk fails.",
    ),
    Declared(
        _C,
        "kvtier_disk_written_blocks",
        ("disk",),
        "Blocks written to a disk.",
        "How much a disk is worn by blocks.",
    ),
    Declared(
        _C,
        "kvtier_disk_written_bytes",
        ("disk",),
        "Bytes of the blocks written to a disk.",
        "Wear, against what the disk is made for.",
    ),
    Declared(
        _C,
        "kvtier_disk_read_blocks",
        ("disk",),
        "Blocks read from a disk.",
        "What the disk tier saves: each is a block of a prompt that nobody computed.",
    ),
    Declared(
        _C,
        "kvtier_disk_read_bytes",
        ("disk",),
        "Bytes of the blocks read from a disk.",
        "What the disk tier saves, in bytes.",
    ),
    Declared(
        _C,
        "kvtier_disk_evicted_blocks",
        ("disk",),
        "Blocks dropped to make room on a disk.",
        "Whether the disk is large enough.",
    ),
    Declared(
        _C,
        "kvtier_disk_errors",
        ("disk",),
        "Jobs of a disk that failed, or were too slow.",
        "Rising: look at the disk's state (kvtier_disk_state), and at the log.",
    ),
    Declared(
        _C,
        "kvtier_disk_corrupt_blocks",
        ("disk",),
        "Blocks that did not match when they were read or checked. Never served.",
        "Anything above 0: the disk fails.",
    ),
    Declared(
        _C,
        "kvtier_promoted_blocks",
        (),
        "Blocks read from a disk to the host.",
        "Hits of the disk tier.",
    ),
    Declared(
        _C,
        "kvtier_promoted_bytes",
        (),
        "Bytes of the blocks read from a disk to the host.",
        "Bytes of the hits of the disk tier.",
    ),
    Declared(
        _C,
        "kvtier_recompute_blocks",
        (),
        "Blocks reported as misses because computing them is faster than loading them.",
        "High: the disks are slower than the GPUs.",
    ),
    Declared(
        _C,
        "kvtier_evicted_unwritten_blocks",
        (),
        "Blocks evicted from the host before a disk had them.",
        "Rising: the disks are too slow for what is stored.",
    ),
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
