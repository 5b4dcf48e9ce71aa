"""Tables of engines, their processes, copy workers and namespaces, for people."""

from collections.abc import Iterable, Sequence

from kvtier.v1 import admin_pb2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtierd.config.settings import human_size
from kvtierd.ctl.terminal import Row, facts, indented, state, table
from kvtierd.ctl.text import duration, shortened

CPU = "cpu"
"""What a StatusResponse calls the device that is the host itself."""
DISK_PREFIX = "disk-"
"""How the names of the devices that are disks begin."""
ENGINE_HEADS = ("NO", "ENGINE", "STATE", "MODEL", "RANKS", "MAPPED", "LEASED", "TRANSFERS", "NAMESPACE")
WORKER_HEADS = ("WORKER", "STATE", "PID", "PARTS", "MAPPED", "REGISTERED", "REPLACED")
GROUP_HEADS = ("GROUP", "RANKS", "TOKENS", "BLOCK", "IN MEMORY", "ON DISK", "ENGINES")
PROCESS_HEADS = ("ENGINE", "ROLE", "PID", "ATTACHED FOR", "CLIENT")


def state_of(instance: admin_pb2.InstanceStatus) -> str:
    """One word for how an engine is."""
    if instance.audit_mismatches:
        return "quarantined"
    return "ready" if instance.ready else "incomplete" if instance.sessions else "ending"


def engines(status: admin_pb2.StatusResponse) -> RenderableType:
    """The page of `kvtierctl engines`: the engines, and the processes of each."""
    if not status.instances:
        return "no engine is attached"
    return Group(
        engine_table(status.instances), *notes(status.instances), Text(""), process_table(status.instances)
    )


def engine_table(
    instances: Iterable[admin_pb2.InstanceStatus],
    heads: Iterable[str] = ENGINE_HEADS,
    name_width: int | None = None,
    model_width: int | None = None,
) -> Table:
    """What each engine is and holds: the columns `heads`, of ENGINE_HEADS. Names that are longer than a given
    width lose their beginnings."""
    rows: list[Row] = [
        {
            "NO": str(each.number),
            "ENGINE": shortened(each.instance, name_width),
            "STATE": state(state_of(each)),
            "MODEL": shortened(each.model or "-", model_width),
            "RANKS": str(each.world_size),
            "MAPPED": human_size(each.mapped_bytes),
            "LEASED": f"{each.leased_blocks:,}",
            "TRANSFERS": f"{each.transfers_active:,}",
            # How a digest begins is enough to name a namespace.
            "NAMESPACE": Text(each.namespace_digest or "-", no_wrap=True, overflow="ellipsis"),
        }
        for each in instances
    ]
    return table(heads, rows)


def notes(instances: Iterable[admin_pb2.InstanceStatus]) -> list[Text]:
    """One sentence for each engine that has left its namespace by itself."""
    return [
        Text(
            f"{each.instance} is quarantined: {each.audit_mismatches:,} of {each.audits:,} audits found "
            "blocks in its namespace that it does not compute; it neither loads nor stores there "
            "(docs/operate.md)",
            "red",
        )
        for each in instances
        if each.audit_mismatches
    ]


def process_table(instances: Iterable[admin_pb2.InstanceStatus]) -> Table:
    """The processes of every engine."""
    rows: list[Row] = [
        {
            "ENGINE": each.instance,
            "ROLE": process.role,
            "PID": str(process.pid) if process.pid else "in another pid namespace",
            "ATTACHED FOR": duration(process.attached_s),
            "CLIENT": process.client,
        }
        for each in instances
        for process in each.sessions
    ]
    return table(PROCESS_HEADS, rows)


def copy_workers(status: admin_pb2.StatusResponse) -> list[admin_pb2.WorkerStatus]:
    """The workers that copy blocks from and to engines."""
    return [each for each in status.workers if not each.device.startswith(DISK_PREFIX)]


def worker_table(
    workers: Iterable[admin_pb2.WorkerStatus],
    heads: Iterable[str] = WORKER_HEADS,
    name_width: int | None = None,
) -> Table:
    """What each copy worker does: the columns `heads`, of WORKER_HEADS. Names that are longer than a given
    width lose their beginnings. A worker of a GPU registers the pool with its driver."""
    rows: list[Row] = [
        {
            "WORKER": shortened(each.device, name_width),
            "STATE": state(each.state),
            "PID": str(each.pid),
            "PARTS": f"{each.parts_active:,}",
            "MAPPED": human_size(each.mapped_bytes),
            "REGISTERED": "-" if each.device == CPU else human_size(each.registered_bytes),
            "REPLACED": f"{each.respawns:,}",
        }
        for each in workers
    ]
    return table(heads, rows)


def namespaces(found: Sequence[admin_pb2.NamespaceStatus], fields: bool = False) -> RenderableType:
    """The page of `kvtierctl namespaces`: each namespace with its groups, and with `fields` what its engines
    have said of it."""
    if not found:
        return "no engine has attached yet, and the pool is empty"
    parts: list[RenderableType] = []
    for digest in dict.fromkeys(each.namespace_digest for each in found):
        groups = [each for each in found if each.namespace_digest == digest]
        model = groups[0].model or "(of an earlier daemon)"
        parts += [Text.assemble((f"namespace {digest}", "bold"), f"  {model}"), indented(_groups(groups))]
        if fields:
            parts.append(facts("", ((f"{field.name} =", field.value) for field in groups[0].fields)))
        parts.append(Text(""))
    return Group(*parts[:-1])


def _groups(groups: Iterable[admin_pb2.NamespaceStatus]) -> Table:
    rows: list[Row] = [
        {
            "GROUP": str(each.group),
            "RANKS": str(each.world_size or "-"),
            "TOKENS": str(each.block_tokens or "-"),
            "BLOCK": human_size(each.block_bytes) if each.block_bytes else "-",
            "IN MEMORY": f"{each.host_blocks:,}",
            "ON DISK": f"{each.disk_blocks:,}",
            "ENGINES": ", ".join(each.instances) or "-",
        }
        for each in groups
    ]
    return table(GROUP_HEADS, rows)
