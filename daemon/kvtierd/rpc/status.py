"""A snapshot as Admin.Status reports it."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from kvtier.v1 import admin_pb2, types_pb2

from kvtierd.cache import Cleared, Snapshot
from kvtierd.config.reload import Reloaded
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.maintenance.explain import PlaceStatus
from kvtierd.core.status import InstanceStatus, TenantStatus
from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.explaining import fields_of
from kvtierd.rpc.fitting import as_many_as_fit

_Message = TypeVar("_Message", bound=Message)


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


async def status_response(about: AboutDaemon, snapshot: Snapshot, viewer: Viewer) -> admin_pb2.StatusResponse:
    """The snapshot, with those engines and tenants that `viewer` may see. Everything else is about the whole
    daemon. It gives way to the event loop between two instances, whose settings may be many."""
    core, pool, integrity = snapshot.core, snapshot.pool, snapshot.core.integrity
    response = _message(
        admin_pb2.StatusResponse,
        about,
        snapshot,
        core,
        pool=_message(
            admin_pb2.PoolStatus,
            pool,
            core,
            pool.start,
            start="warm" if pool.start.warm else "cold",
            recovery_s=pool.start.seconds,
        ),
        blocks=_message(admin_pb2.BlockStatus, core.blocks),
        integrity=_message(
            admin_pb2.IntegrityStatus,
            integrity,
            core,
            core.counters,
            verify=integrity.verify.value,
            expected_detection_s=core.expected_detection_s or 0.0,
            found_on_load=core.counters.corrupt_on_load,
            found_after_restart=core.counters.corrupt_after_restart,
            found_in_sample=core.counters.corrupt_in_sample,
        ),
        instances=[],
        tenants=[_tenant(each, viewer) for each in core.tenants if _sees(viewer, each)],
        workers=[_message(admin_pb2.WorkerStatus, worker) for worker in snapshot.workers],
        disks=[
            _message(admin_pb2.DiskStatus, disk, disk.core, disk.core.counters) for disk in snapshot.disks
        ],
        counters=_message(admin_pb2.Counters, core.counters),
        shadow=_message(admin_pb2.ShadowStatus, core.shadow),
        events=None if snapshot.events is None else _message(admin_pb2.EventsStatus, snapshot.events),
        refused_imports=[
            admin_pb2.RefusedImports(device=device.name, error=error, count=count, why=device.refused_why)
            for device in snapshot.devices
            for error, count in device.refused_imports.items()
        ],
    )
    for each in core.instances:
        if viewer.sees(each.owner.tenant):
            response.instances.append(_instance(each, snapshot))
            await asyncio.sleep(0)
    return response


def _message(kind: type[_Message], *sources: object, **fields: Any) -> _Message:
    """A message with these fields. Every other field has the value of the attribute of its name, of the first
    of the sources that has one; AttributeError if none has."""
    for name in kind.DESCRIPTOR.fields_by_name:
        if name not in fields:
            source = next((each for each in sources if hasattr(each, name)), None)
            fields[name] = getattr(source, name)
    return kind(**fields)


def _instance(instance: InstanceStatus, snapshot: Snapshot) -> admin_pb2.InstanceStatus:
    sessions = [snapshot.sessions[each] for each in instance.sessions if each in snapshot.sessions]
    return _message(
        admin_pb2.InstanceStatus,
        instance,
        instance=instance.name,
        tenant=instance.owner.tenant,
        namespace_digest=instance.namespace.hex() if instance.namespace else "",
        sessions=[
            _message(
                admin_pb2.SessionStatus,
                session,
                attached_s=snapshot.now_s - session.attached_at_s,
                configuration=_settings(session.configuration),
            )
            for session in sessions
        ],
    )


def _sees(viewer: Viewer, tenant: TenantStatus) -> bool:
    """Whether a viewer may see this tenant. One whose name is not known is known by its tag."""
    if tenant.name:
        return viewer.sees(tenant.name)
    return viewer.tenant is None or (viewer.tenant != "" and tag_of(viewer.tenant) == tenant.tag)


def _tenant(tenant: TenantStatus, viewer: Viewer) -> admin_pb2.TenantStatus:
    name = tenant.name or viewer.tenant or f"tag:{tenant.tag:08x}"
    return _message(admin_pb2.TenantStatus, tenant, tenant.counters, tenant=name)


def _settings(pairs: Iterable[tuple[str, str]]) -> list[types_pb2.Setting]:
    return [types_pb2.Setting(name=name, value=value) for name, value in pairs]


def reload_response(found: Reloaded) -> admin_pb2.ReloadResponse:
    return admin_pb2.ReloadResponse(
        applied=[_message(admin_pb2.SettingChange, each) for each in found.applied],
        needs_restart=[_message(admin_pb2.SettingChange, each) for each in found.needs_restart],
    )


def clear_response(cleared: Cleared) -> admin_pb2.ClearResponse:
    return _message(admin_pb2.ClearResponse, cleared.blocks, unsettled_paths=cleared.unsettled)


async def namespaces_response(found: Sequence[PlaceStatus]) -> admin_pb2.ListNamespacesResponse:
    """The fields of a namespace, which may be long, are told with the first of its groups."""
    first = {each.place.namespace: each for each in reversed(found)}
    namespaces = await as_many_as_fit(
        found, lambda each: _namespace_status(each, with_fields=first[each.place.namespace] is each)
    )
    return admin_pb2.ListNamespacesResponse(namespaces=namespaces, left_out=len(found) - len(namespaces))


def _namespace_status(each: PlaceStatus, *, with_fields: bool) -> admin_pb2.NamespaceStatus:
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
        message.tenant = about.tenant
        message.world_size = about.world_size
        message.hash_bytes = about.hash_bytes
        message.block_tokens = group.block_tokens
        if with_fields:
            message.fields.extend(_settings(fields_of(about)))
        message.block_bytes = group.slot_bytes * (1 if group.replicated else about.world_size)
    return message
