"""Tables of engines, their processes, copy workers and namespaces, for people."""

from collections.abc import Callable, Mapping

from kvtier.connection.reach import user_of
from kvtier.v1.admin_pb2 import (
    InstanceStatus,
    ListNamespacesResponse,
    NamespaceStatus,
    RefusedImports,
    SessionStatus,
    StatusResponse,
    TenantStatus,
    WorkerStatus,
)
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.config.settings import human_size
from kvtierd.ctl.terminal import facts, indented, state, table
from kvtierd.ctl.text import count, duration

CPU = "cpu"
"""What a StatusResponse calls the device that is the host itself."""
DISK_PREFIX = "disk-"
"""Begins the names of devices that are disks."""
ENGINE: Mapping[str, Callable[[InstanceStatus], RenderableType]] = {
    "NO": lambda each: str(each.number),
    "ENGINE": lambda each: each.instance,
    "STATE": lambda each: state(state_of(each)),
    "MODEL": lambda each: each.model or "-",
    "RANKS": lambda each: str(each.world_size),
    "MAPPED": lambda each: human_size(each.mapped_bytes),
    "LEASED": lambda each: f"{each.leased_blocks:,}",
    "TRANSFERS": lambda each: f"{each.transfers_active:,}",
    # The beginning of a digest is enough to name a namespace.
    "NAMESPACE": lambda each: Text(each.namespace_digest or "-", no_wrap=True, overflow="ellipsis"),
}
PROCESS: Mapping[str, Callable[[tuple[InstanceStatus, SessionStatus]], RenderableType]] = {
    "ENGINE": lambda each: each[0].instance,
    "ROLE": lambda each: each[1].role,
    "PID": lambda each: str(each[1].pid) if each[1].pid else "in another pid namespace",
    "USER": lambda each: user_of(each[1].uid).name,
    "ATTACHED FOR": lambda each: duration(each[1].attached_s),
    "CLIENT": lambda each: each[1].client,
}
TENANT: Mapping[str, Callable[[TenantStatus], RenderableType]] = {
    "TENANT": lambda each: each.tenant,
    "IN MEMORY": lambda each: human_size(each.host_bytes),
    "ON DISK": lambda each: human_size(each.disk_bytes),
    "GUARANTEED": lambda each: f"{each.guaranteed_fraction:.0%}",
    "AT MOST": lambda each: f"{each.most_fraction:.0%}",
    "LEASED": lambda each: human_size(each.leased_bytes),
    "ENGINES": lambda each: f"{each.instances:,}",
    "STORED": lambda each: human_size(each.stored_bytes),
    "LOADED": lambda each: human_size(each.loaded_bytes),
    "HIT RATE": lambda each: f"{each.lookup_hits / each.lookup_hashes:.1%}" if each.lookup_hashes else "-",
    "EVICTED": lambda each: f"{each.evicted_blocks:,}",
}
WORKER: Mapping[str, Callable[[WorkerStatus], RenderableType]] = {
    "WORKER": lambda each: each.device,
    "STATE": lambda each: state(each.state),
    "PID": lambda each: str(each.pid),
    "PARTS": lambda each: f"{each.parts_active:,}",
    "MAPPED": lambda each: human_size(each.mapped_bytes),
    "REGISTERED": lambda each: "-" if each.device == CPU else human_size(each.registered_bytes),
    "REPLACED": lambda each: f"{each.respawns:,}",
}
GROUP: Mapping[str, Callable[[NamespaceStatus], RenderableType]] = {
    "GROUP": lambda each: str(each.group),
    "RANKS": lambda each: str(each.world_size or "-"),
    "TOKENS": lambda each: str(each.block_tokens or "-"),
    "BLOCK": lambda each: human_size(each.block_bytes) if each.block_bytes else "-",
    "IN MEMORY": lambda each: f"{each.host_blocks:,}",
    "ON DISK": lambda each: f"{each.disk_blocks:,}",
    "ENGINES": lambda each: ", ".join(each.instances) or "-",
}


def state_of(instance: InstanceStatus) -> str:
    """The state of an engine, in one word."""
    if instance.audit_mismatches:
        return "quarantined"
    return "ready" if instance.ready else "incomplete" if instance.sessions else "ending"


def engines(status: StatusResponse) -> RenderableType:
    """The page of `kvtierctl engines`: the engines, and the processes of each."""
    refused = refused_imports(status)
    if not status.instances:
        return Group("no engine is attached", *refused) if refused else "no engine is attached"
    processes = [(each, process) for each in status.instances for process in each.sessions]
    notes = [
        Text(
            f"{each.instance} is quarantined: {each.audit_mismatches:,} of {each.audits:,} audits found "
            "blocks in its namespace that it does not compute; it neither loads nor stores there "
            "(docs/operate.md)",
            "red",
        )
        for each in status.instances
        if each.audit_mismatches
    ]
    return Group(table(ENGINE, status.instances), *notes, *refused, Text(""), table(PROCESS, processes))


def refused_imports(status: StatusResponse) -> list[Text]:
    """What keeps the daemon from copying to and from engines' GPU memory itself, a note for each GPU."""
    by_device: dict[str, list[RefusedImports]] = {}
    for each in status.refused_imports:
        by_device.setdefault(each.device, []).append(each)
    return [
        Text(
            f"{device}: the memory of engines could not be opened "
            f"{count(sum(each.count for each in found), 'time')}. Their blocks go through a mirror in host "
            f"memory, which is slower, unless they are set to share=export. {found[0].why}",
            "yellow",
        )
        for device, found in by_device.items()
    ]


def copy_workers(status: StatusResponse) -> list[WorkerStatus]:
    """The workers that copy blocks from and to engines."""
    return [each for each in status.workers if not each.device.startswith(DISK_PREFIX)]


def namespaces(found: ListNamespacesResponse, asked: str, fields: bool) -> RenderableType:
    """The page of `kvtierctl namespaces`: each namespace with its groups, and with `fields` what its engines
    have said about it. `asked` is how the digests begin that were asked for; "" if all were."""
    if not found.namespaces:
        if asked:
            return f"no namespace that is known begins with '{asked}'; without --namespace, all are listed"
        return "no engine has attached yet, and the pool is empty"
    by_digest: dict[str, list[NamespaceStatus]] = {}
    for each in found.namespaces:
        by_digest.setdefault(each.namespace_digest, []).append(each)
    parts: list[RenderableType] = []
    for digest, groups in by_digest.items():
        model = groups[0].model or "(of an earlier daemon)"
        tenant = f", tenant {groups[0].tenant}" if groups[0].tenant else ""
        parts += [
            Text.assemble((f"namespace {digest}", "bold"), f"  {model}", tenant),
            indented(table(GROUP, groups)),
        ]
        if fields:
            parts.append(facts("", ((f"{field.name} =", field.value) for field in groups[0].fields)))
        parts.append(Text(""))
    if not found.left_out:
        return Group(*parts[:-1])
    return Group(
        *parts,
        f"{count(found.left_out, 'older group')} did not fit into the daemon's answer: "
        "--namespace DIGEST, also with the beginning of a digest, lists fewer",
    )
