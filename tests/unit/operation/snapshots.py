"""A snapshot with a different number in every place, to see each of them arrive."""

from kvtierd.cache import DiskSnapshot, SessionAbout, Snapshot
from kvtierd.cache.snapshot import CopySnapshot, DeviceSnapshot, PoolSnapshot, WorkerSnapshot
from kvtierd.core.ids import DiskId, Epoch, NamespaceDigest, SessionId, WorkerId
from kvtierd.core.status import (
    BlockCounts,
    CoreStatus,
    DiskStatus,
    DiskTally,
    InstanceStatus,
    SizeStatus,
    Tally,
    WorkerStatus,
)
from kvtierd.core.stimuli import CoreIntegrity, Owner
from kvtierd.memory import PoolStart

GPU = "GPU-00000000-1111-2222-3333-444444444444"
IDLE_GPU = "GPU-00000000-1111-2222-3333-555555555555"
BROKEN_GPU = "GPU-00000000-1111-2222-3333-666666666666"


def disk_status(number: int, state: str) -> DiskStatus:
    return DiskStatus(
        disk=DiskId(number),
        state=state,
        why="",
        used_bytes=16 << 20,
        capacity_bytes=64 << 20,
        blocks=83,
        corrupt_slots=2 * number,
        extents=64,
        extents_free=48,
        sizes=(),
        jobs=9,
        writing_bytes=84 << 10,
        reading_bytes=85 << 10,
        read_bytes_per_s=2e9,
        write_bytes_per_s=1e9,
        scrub_blocks=88,
        scrubbed_blocks=22,
        scrubbing=True,
        counters=DiskTally(
            written_blocks=90,
            written_bytes=91 << 10,
            read_blocks=92,
            read_bytes=93 << 10,
            evicted_blocks=94,
            reclaimed_extents=95,
            errors=96,
            corrupt_blocks=3 * number,
        ),
    )


def busy_snapshot() -> Snapshot:
    instance = InstanceStatus(
        name="engine-0",
        owner=Owner("uid:1000", 1000),
        number=1,
        epoch=Epoch(12),
        ready=True,
        world_size=1,
        model="tiny",
        namespace=NamespaceDigest(b"\xcd" * 16),
        sessions=(SessionId(1), SessionId(99)),
        mapped_bytes=3 << 20,
        leases=2,
        leased_blocks=17,
        leased_bytes=17 << 12,
        transfers_active=4,
        fencing=False,
        audits=9,
        audit_mismatches=1,
    )
    core = CoreStatus(
        leases=2,
        leased_blocks=17,
        lease_oldest_s=12.5,
        transfers_active=4,
        blocks=BlockCounts(writing=5, ready=60, evicting=7, capacity=1000),
        used_bytes=8 << 20,
        extents=16,
        extents_free=9,
        quarantined_slots=3,
        corrupt_slots=2,
        integrity=CoreIntegrity(),
        held_blocks=48,
        held_bytes=49 << 10,
        expected_detection_s=125.0,
        sizes=(SizeStatus(4096, 2, 500, 120, 5), SizeStatus(65536, 1, 15, 15, 0)),
        instances=(instance,),
        workers=(
            WorkerStatus(WorkerId(1), "cpu", False, 1, 6, 3 << 20),
            WorkerStatus(WorkerId(2), GPU, False, 1, 7, 5 << 20),
        ),
        counters=Tally(
            audits=9,
            audit_mismatches=1,
            lookups=21,
            lookup_hashes=400,
            lookup_hits=100,
            missed_absent=110,
            missed_pending=60,
            missed_beyond=35,
            missed_lease_limit=15,
            missed_recompute=40,
            missed_draining=22,
            missed_not_ready=18,
            evicted_age_s=290.5,
            store_transfers=56,
            store_transfer_s=5.6,
            load_transfers=40,
            load_transfer_s=4.5,
            ended_leases=36,
            lease_held_s=72.5,
            stored_blocks=23,
            stored_bytes=24 << 10,
            loaded_blocks=25,
            loaded_bytes=26 << 10,
            deduplicated_blocks=27,
            throttled_blocks=28,
            evicted_blocks=29,
            cleared_blocks=45,
            expired_blocks=46,
            unheld_blocks=47,
            reclaimed_extents=30,
            done_transfers=31,
            failed_transfers=32,
            cancelled_transfers=33,
            expired_leases=34,
            refused_leases=35,
            corrupt_on_load=11,
            corrupt_after_restart=12,
            corrupt_in_sample=13,
            sampled_slots=70,
            sampled_bytes=71 << 20,
            ended_epochs=37,
            promoted_blocks=38,
            promoted_bytes=39 << 10,
            recompute_blocks=40,
            evicted_unwritten_blocks=14,
            index_lookups=15,
            corrupt_on_disk=15,
        ),
        draining=False,
        disks=(disk_status(0, "live"), disk_status(1, "failing")),
    )
    return Snapshot(
        state="serving",
        now_s=1000.0,
        uptime_s=3725.0,
        boot_nonce=2**64 - 1,
        pool=PoolSnapshot(
            "/dev/shm/kvtier-0/pool",
            20 << 20,
            18 << 20,
            16 << 20,
            3,
            PoolStart(True, "", 41, 42 << 10, 3, 44, 0.5),
        ),
        core=core,
        sessions={SessionId(1): SessionAbout("scheduler and rank 0", 4321, "test 1", 940.0)},
        devices=(
            DeviceSnapshot("cpu", False, 2),
            DeviceSnapshot(GPU, False, 3),
            DeviceSnapshot(IDLE_GPU, True, 4),
            DeviceSnapshot(BROKEN_GPU, False, 5),
            DeviceSnapshot("disk-0", False, 6),
            DeviceSnapshot("disk-1", False, 7),
        ),
        workers=(
            WorkerSnapshot("cpu", 777, "live", 2, 6, 3 << 20, 0, 0),
            WorkerSnapshot(GPU, 888, "live", 3, 7, 5 << 20, 9 << 20, 4 << 20),
            WorkerSnapshot("disk-0", 999, "live", 6, 8, 0, 0, 0),
        ),
        disks=(
            DiskSnapshot("/mnt/a", 64 << 20, "live", "", "", True, 81, 82 << 10, 0.8, core.disks[0]),
            DiskSnapshot(
                "/mnt/b", 64 << 20, "failing", "EIO", "no slab yet", False, 0, 0, 0.1, core.disks[1], True
            ),
        ),
        copies={
            "store": CopySnapshot(51, 0.52, {"DONE": 53, "FAILED": 1}),
            "load": CopySnapshot(61, 0.62, {}),
        },
    )
