"""What `kvtierctl engines` and `kvtierctl namespaces` print for people."""

from collections.abc import Iterator, Sequence

from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size
from kvtierd.ctl.text import duration


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under their heads: the first row. Numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [
        all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in zip(*rows, strict=True)
    ]
    for row in rows:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        yield "  ".join(cells).rstrip()


def state_of(instance: admin_pb2.InstanceStatus) -> str:
    if instance.audit_mismatches:
        return "quarantined"
    return "ready" if instance.ready else "incomplete" if instance.sessions else "ending"


def engines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """One line for each engine, and one for each of its sessions."""
    if not status.instances:
        yield "no engine is attached"
        return
    heads = ("NO", "ENGINE", "STATE", "MODEL", "RANKS", "MAPPED", "LEASED", "TRANSFERS", "NAMESPACE")
    rows = [heads] + [
        (
            str(each.number),
            each.instance,
            state_of(each),
            each.model or "-",
            str(each.world_size),
            human_size(each.mapped_bytes),
            f"{each.leased_blocks:,}",
            f"{each.transfers_active:,}",
            each.namespace_digest or "-",
        )
        for each in status.instances
    ]
    lines = list(table(rows))
    yield lines[0]
    for instance, line in zip(status.instances, lines[1:], strict=True):
        yield line
        if instance.audit_mismatches:
            yield (
                f"  quarantined: {instance.audit_mismatches:,} of {instance.audits:,} audits found blocks in "
                "its namespace that it does not compute; it neither loads nor stores there (docs/operate.md)"
            )
        for session in instance.sessions:
            who = f"pid {session.pid}" if session.pid else "in another pid namespace"
            yield f"  {session.role}: {who}, attached for {duration(session.attached_s)}, {session.client}"


def namespaces(found: Sequence[admin_pb2.NamespaceStatus], fields: bool = False) -> Iterator[str]:
    """One line for each group of each namespace; `fields`: and one for each field below its first group."""
    rows = [("NAMESPACE", "GROUP", "MODEL", "RANKS", "BLOCK", "IN MEMORY", "ON DISK", "ENGINES")]
    for each in found:
        known = each.block_bytes > 0
        rows.append(
            (
                each.namespace_digest,
                str(each.group),
                each.model or "(of an earlier daemon)",
                str(each.world_size) if known else "-",
                f"{each.block_tokens} tokens, {human_size(each.block_bytes)}" if known else "-",
                f"{each.host_blocks:,}",
                f"{each.disk_blocks:,}",
                ", ".join(each.instances) or "-",
            )
        )
    if len(rows) == 1:
        yield "no engine has attached yet, and the pool is empty"
        return
    head, *lines = table(rows)
    yield head
    shown: set[str] = set()
    for each, line in zip(found, lines, strict=True):
        yield line
        if fields and each.namespace_digest not in shown:
            shown.add(each.namespace_digest)
            yield from (f"  {field.name} = {field.value}" for field in each.fields)
