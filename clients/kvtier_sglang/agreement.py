"""Ranks of one engine that have to decide the same thing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """The groups of ranks that SGLang's radix cache agrees in. They exchange over CPUs, so no GPU is waited
    for. Every rank has to ask equally often, and in the same order."""

    def __init__(self, params: Any) -> None:
        """`params`: SGLang's CacheInitParams."""
        groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._groups = [group for group in groups if _size(group) > 1]
        if not self._groups and _size(params.tp_cache_group) > 1:
            self._groups = [params.tp_cache_group]

    def all_say(self, yes: bool) -> bool:
        """Returns whether all ranks say yes. Waits for all of them."""
        if not self._groups:
            return yes
        said = torch.tensor([int(yes)], dtype=torch.int)
        for group in self._groups:
            dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
        return bool(said.item())


def _size(group: Any) -> int:
    if group is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size(group=group))
