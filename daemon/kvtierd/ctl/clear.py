"""The question of `kvtierctl clear`, and its answer."""

from collections.abc import Iterator

from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size
from kvtierd.ctl.text import count


def question(found: admin_pb2.ListNamespacesResponse, namespace: str) -> str:
    """Asks whether to drop these blocks, and names them. `found` has what begins with `namespace`."""
    digests = {each.namespace_digest for each in found.namespaces}
    on_host = count(sum(each.host_blocks for each in found.namespaces), "block")
    on_disk = count(sum(each.disk_blocks for each in found.namespaces), "block")
    what = f"all namespaces ({len(digests):,})"
    if namespace:
        what = f"namespace {min(digests) if len(digests) == 1 else namespace}"
    if found.left_out:
        what += f" and {count(found.left_out, 'more group')}, whose blocks are not counted here"
    return f"Drop {on_host} in memory and {on_disk} on disks, of {what}?"


def cleared(answer: admin_pb2.ClearResponse) -> Iterator[str]:
    """Says what was dropped and what stays, line by line."""
    sizes = f"{human_size(answer.host_bytes)} of memory, {human_size(answer.disk_bytes)} on disks"
    yield f"{count(answer.cleared_blocks, 'block')} dropped: {sizes}"
    if answer.held_blocks:
        yield f"  stay   {count(answer.held_blocks, 'block')} leased or being loaded"
    if answer.under_way_blocks:
        under_way = count(answer.under_way_blocks, "block")
        yield f"  stay   {under_way} being stored, promoted or written to a disk"
    for path in answer.unsettled_paths:
        yield f"  disk   {path} does not keep it yet: blocks may come back from there after a restart"
