"""Chooses in which of the ways of `sharing` a GPU's KV cache is shared: as configured, or as is possible."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier import Group, KvtierError

from kvtier_vllm.worker.gpu import EngineGpu, GpuKVMemory
from kvtier_vllm.worker.kv_memory import NotShareable
from kvtier_vllm.worker.mirroring import MirrorSharing
from kvtier_vllm.worker.sharing import GpuSharing, Sharing

if TYPE_CHECKING:
    from kvtier.cuda import DeviceMemory


SLOWER = "blocks go through a mirror in host memory, which is slower"


def share_gpu(
    memory: GpuKVMemory, groups: Sequence[Group], share: str, gpu: EngineGpu, log: logging.Logger
) -> Sharing:
    """Shares the KV cache as the setting `share` says. Raises NotShareable, which says what to change."""
    from kvtier.cuda import NotExportableError

    device_memory = memory.device_memory
    try:
        if share == "mirror" or not _exportable(device_memory, share, log):
            return MirrorSharing(device_memory, covering(groups), gpu, log)

        def mirror(error: KvtierError) -> Sharing | None:
            if share == "export":
                return None
            try:
                sharing = MirrorSharing(device_memory, covering(groups), gpu, log)
            except (KvtierError, NotShareable, OSError) as refusal:
                log.warning("kvtier: the KV cache cannot be mirrored in host memory either: %s", refusal)
                return None
            log.warning("kvtier: %s: %s", SLOWER, error)
            return sharing

        return GpuSharing(device_memory, gpu, mirror)
    except NotExportableError as error:
        message = f'the KV cache cannot be shared: {error}; or set "share": "mirror", which is slower'
        raise NotShareable(message) from error
    except KvtierError as error:
        raise NotShareable(f"the KV cache cannot be shared: {error}") from error


def covering(groups: Sequence[Group]) -> Group:
    """Returns a group whose blocks have all bytes that a block has in some group. A block's own group uses
    some of them, and the rest are unused. Raises NotShareable if the groups' blocks are not equally far
    apart."""
    planes = sorted((plane for group in groups for plane in group.planes), key=lambda one: one.base_offset)
    covered = [planes[0]]
    for plane in planes[1:]:
        last = covered[-1]
        end = last.base_offset + last.fragment_bytes
        if plane.block_stride_bytes != last.block_stride_bytes:
            raise NotShareable(
                "the KV cache has groups whose blocks are not equally far apart, which cannot be mirrored in "
                "host memory; use memory that can be exported"
            )
        if plane.base_offset < end:
            end = max(end, plane.base_offset + plane.fragment_bytes)
            covered[-1] = dataclasses.replace(last, fragment_bytes=end - last.base_offset)
        else:
            covered.append(plane)
    return dataclasses.replace(groups[0], planes=tuple(covered))


def _exportable(memory: DeviceMemory, share: str, log: logging.Logger) -> bool:
    """Returns whether the memory can be exported. Where it cannot, raises NotExportableError for "export".
    Raises KvtierError if it is no memory of a GPU."""
    from kvtier.cuda import NotExportableError

    try:
        memory.check()
    except NotExportableError as error:
        if share == "export":
            raise
        log.warning("kvtier: %s: %s", SLOWER, error)
        return False
    return True
