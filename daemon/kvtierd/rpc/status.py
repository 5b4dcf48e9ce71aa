"""A snapshot as Admin.Status reports it."""

from dataclasses import dataclass

from kvtier.v1 import admin_pb2, types_pb2

from kvtierd.cache import Cleared, DiskSnapshot, Snapshot
from kvtierd.config.reload import Change, Reloaded
from kvtierd.core.maintenance.explain import PlaceStatus
from kvtierd.rpc.explaining import fields_of


@dataclass(frozen=True, slots=True)
class AboutDaemon:
    """What does not change while the daemon runs."""

    version: str
    pid: int
    socket: str
    metrics_url: str
    """Empty if metrics are off."""
    command: str = ""
    """The command line that started the daemon, quoted for a shell."""


def status_response(about: AboutDaemon, snapshot: Snapshot) -> admin_pb2.StatusResponse:
    core, pool = snapshot.core, snapshot.pool
    return admin_pb2.StatusResponse(
        version=about.version,
        boot_nonce=snapshot.boot_nonce,
        pid=about.pid,
        uptime_s=snapshot.uptime_s,
        state=snapshot.state,
        socket=about.socket,
        metrics_url=about.metrics_url,
        pool=admin_pb2.PoolStatus(
            path=pool.path,
            capacity_bytes=pool.capacity_bytes,
            used_bytes=core.used_bytes,
            extents=core.extents,
            extents_free=core.extents_free,
            start="warm" if pool.warm else "cold",
            cold_reason=pool.cold_reason,
            recovered_blocks=pool.recovered_blocks,
            recovered_bytes=pool.recovered_bytes,
            quarantined_slots=pool.quarantined_slots,
            discarded_slots=pool.discarded_slots,
            recovery_s=pool.recovery_s,
            size_bytes=pool.size_bytes,
            file_bytes=pool.file_bytes,
        ),
        blocks=admin_pb2.BlockStatus(
            writing=core.blocks.writing,
            ready=core.blocks.ready,
            evicting=core.blocks.evicting,
            capacity=core.blocks.capacity,
        ),
        integrity=admin_pb2.IntegrityStatus(
            verify=core.integrity.verify.value,
            sample_bytes_per_s=core.integrity.sample_bytes_per_s,
            expected_detection_s=core.expected_detection_s or 0.0,
            sampled_slots=core.counters.sampled_slots,
            sampled_bytes=core.counters.sampled_bytes,
            corrupt_slots=core.corrupt_slots,
            found_on_load=core.counters.corrupt_on_load,
            found_after_restart=core.counters.corrupt_after_restart,
            found_in_sample=core.counters.corrupt_in_sample,
        ),
        instances=[
            admin_pb2.InstanceStatus(
                instance=instance.name,
                number=instance.number,
                epoch=instance.epoch,
                ready=instance.ready,
                world_size=instance.world_size,
                model=instance.model,
                namespace_digest=instance.namespace.hex() if instance.namespace else "",
                sessions=[
                    admin_pb2.SessionStatus(
                        role=session.role,
                        pid=session.pid,
                        client=session.client,
                        attached_s=snapshot.now_s - session.attached_at_s,
                        configuration=[
                            types_pb2.Setting(name=name, value=value) for name, value in session.configuration
                        ],
                    )
                    for session in map(snapshot.sessions.get, instance.sessions)
                    if session is not None
                ],
                mapped_bytes=instance.mapped_bytes,
                leased_blocks=instance.leased_blocks,
                transfers_active=instance.transfers_active,
                audits=instance.audits,
                audit_mismatches=instance.audit_mismatches,
            )
            for instance in core.instances
        ],
        workers=[
            admin_pb2.WorkerStatus(
                device=worker.device,
                pid=worker.pid,
                state=worker.state,
                respawns=worker.respawns,
                parts_active=worker.parts_active,
                mapped_bytes=worker.mapped_bytes,
                registered_bytes=worker.registered_bytes,
            )
            for worker in snapshot.workers
        ],
        disks=[_disk(disk) for disk in snapshot.disks],
        counters=admin_pb2.Counters(
            **{
                field.name: getattr(core.counters, field.name)
                for field in admin_pb2.Counters.DESCRIPTOR.fields
            }
        ),
        leases=core.leases,
        leased_blocks=core.leased_blocks,
        transfers_active=core.transfers_active,
        held_blocks=core.held_blocks,
        held_bytes=core.held_bytes,
    )


def _disk(disk: DiskSnapshot) -> admin_pb2.DiskStatus:
    core = disk.core
    return admin_pb2.DiskStatus(
        path=disk.path,
        state=disk.state,
        why=disk.why,
        capacity_bytes=disk.capacity_bytes,
        used_bytes=core.used_bytes,
        blocks=core.blocks,
        recovered_blocks=disk.recovered_blocks,
        recovered_bytes=disk.recovered_bytes,
        cold_reason=disk.cold_reason,
        direct_io=disk.direct_io,
        written_blocks=core.counters.written_blocks,
        written_bytes=core.counters.written_bytes,
        read_blocks=core.counters.read_blocks,
        read_bytes=core.counters.read_bytes,
        evicted_blocks=core.counters.evicted_blocks,
        errors=core.counters.errors,
        corrupt_blocks=core.counters.corrupt_blocks,
        corrupt_slots=core.corrupt_slots,
        writing_bytes=core.writing_bytes,
        reading_bytes=core.reading_bytes,
        read_bytes_per_s=core.read_bytes_per_s,
        write_bytes_per_s=core.write_bytes_per_s,
        scrub_blocks=core.scrub_blocks,
        scrubbed_blocks=core.scrubbed_blocks,
    )


def reload_response(found: Reloaded) -> admin_pb2.ReloadResponse:
    return admin_pb2.ReloadResponse(
        applied=map(_change, found.applied), needs_restart=map(_change, found.needs_restart)
    )


def _change(change: Change) -> admin_pb2.SettingChange:
    return admin_pb2.SettingChange(key=change.key, before=change.before, after=change.after)


def clear_response(cleared: Cleared) -> admin_pb2.ClearResponse:
    blocks = cleared.blocks
    return admin_pb2.ClearResponse(
        cleared_blocks=blocks.cleared_blocks,
        host_bytes=blocks.host_bytes,
        disk_bytes=blocks.disk_bytes,
        held_blocks=blocks.held_blocks,
        under_way_blocks=blocks.under_way_blocks,
        unsettled_paths=cleared.unsettled,
    )


def namespace_status(each: PlaceStatus) -> admin_pb2.NamespaceStatus:
    place, about = each.place, each.place.about
    message = admin_pb2.NamespaceStatus(
        namespace_digest=place.namespace.hex(),
        group=place.group,
        host_blocks=each.host_blocks,
        disk_blocks=each.disk_blocks,
        instances=each.instances,
    )
    if about is not None:
        group = about.groups[place.group]
        message.model = about.model
        message.world_size = about.world_size
        message.hash_bytes = about.hash_bytes
        message.block_tokens = group.block_tokens
        message.fields.extend(types_pb2.Setting(name=name, value=value) for name, value in fields_of(about))
        message.block_bytes = group.slot_bytes * (1 if group.replicated else about.world_size)
    return message
