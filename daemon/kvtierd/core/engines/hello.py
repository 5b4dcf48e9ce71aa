"""Checks whether a process may join an instance, completely and before anything changes."""

import math
from collections.abc import Iterable

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX
from kvtierd.core.state.entities import Instance
from kvtierd.core.stimuli import AttachSession, GroupGeometry, SessionRole

SHOWN_CHARACTERS, SHOWN_BEFORE = 80, 20
"""In messages, how many characters of a value are shown, and how many of these come before its first
difference from another value."""
WORLD_SIZE_MAX = 0xFFFF
"""A slot record holds it in 16 bits."""


def shards_of(ranks: Iterable[tuple[GroupGeometry, ...]]) -> list[tuple[int, ...]]:
    """Slot bytes of each shard of a block, for each group. `ranks` has what each rank holds, in rank
    order."""
    return [
        (group[0].slot_bytes,) if group[0].replicated else tuple(part.slot_bytes for part in group)
        for group in zip(*ranks, strict=True)
    ]


def check_hello(stimulus: AttachSession, instance: Instance | None, geometry: PoolGeometry) -> None:
    """Raises Refusal if the session makes no sense by itself, or does not fit the instance of its owner that
    has its name."""
    _check_alone(stimulus, geometry)
    check_prefill(stimulus.prefill_tokens_per_s)
    if instance is not None:
        _check_same(stimulus, instance)
        _check_place(stimulus, instance)


def check_prefill(tokens_per_s: float) -> None:
    """Raises Refusal MALFORMED for anything that is no speed."""
    if not (math.isfinite(tokens_per_s) and tokens_per_s >= 0):
        raise Refusal(
            Reason.MALFORMED,
            "a speed is a number of tokens per second, 0 if it is not known",
            field="prefill_tokens_per_s",
            value=tokens_per_s,
        )


def _check_alone(stimulus: AttachSession, geometry: PoolGeometry) -> None:
    if not 1 <= stimulus.world_size <= WORLD_SIZE_MAX:
        raise Refusal(
            Reason.MALFORMED,
            f"an instance has 1 to {WORLD_SIZE_MAX} ranks",
            field="world_size",
            value=stimulus.world_size,
        )
    if not stimulus.role:
        raise Refusal(Reason.MALFORMED, "a session schedules, holds a rank, or both", field="role", value=0)
    if not 1 <= stimulus.hash_bytes <= HASH_BYTES_MAX:
        raise Refusal(
            Reason.MALFORMED,
            f"a block hash has 1 to {HASH_BYTES_MAX} bytes",
            field="namespace.hash_bytes",
            value=stimulus.hash_bytes,
        )
    if SessionRole.RANK not in stimulus.role:
        if stimulus.groups:
            raise Refusal(
                Reason.LAYOUT_INVALID,
                "a session that only schedules holds no memory: leave the groups out",
                field="groups",
                value=len(stimulus.groups),
            )
        return
    if not 0 <= stimulus.rank < stimulus.world_size:
        raise Refusal(
            Reason.MALFORMED, f"ranks are 0 to {stimulus.world_size - 1}", field="rank", value=stimulus.rank
        )
    if not stimulus.groups:
        raise Refusal(Reason.LAYOUT_INVALID, "a rank has at least one group", field="groups", value=0)
    for index, group in enumerate(stimulus.groups):
        if group.block_tokens < 1 or not group.planes or any(size < 1 for size, _ in group.planes):
            raise Refusal(
                Reason.LAYOUT_INVALID,
                "a group has tokens in its blocks, and planes of at least one byte",
                field=f"groups[{index}]",
                value=f"{group.block_tokens} tokens, {len(group.planes)} planes, {group.slot_bytes} bytes",
            )
        if geometry.slots_per_extent(group.slot_bytes) == 0:
            raise Refusal(
                Reason.SLOT_TOO_LARGE,
                f"a rank's share of a block may have {geometry.slot_bytes_max} bytes: make blocks smaller, "
                "or start the daemon with larger extents",
                field=f"groups[{index}]",
                value=f"{group.slot_bytes} bytes",
            )


def _check_same(stimulus: AttachSession, instance: Instance) -> None:
    """All processes of an instance must agree on what its blocks are."""
    _require_equal("world_size", stimulus.world_size, instance.world_size)
    if stimulus.namespace_fields != instance.namespace_fields:
        said, known = dict(stimulus.namespace_facts), instance.namespace_facts
        for name in said | known:
            _require_equal(name, said.get(name), known.get(name))
        # Every field but the salt is among the facts. Nothing that is made of a salt is told, because a short
        # one could be guessed from it.
        raise Refusal(
            Reason.FINGERPRINT_MISMATCH,
            "this process says another salt than the others of its instance: start all of them with the same "
            "settings, or give it another instance name",
            field="namespace.salt",
        )
    _require_equal("namespace.hash_bytes", stimulus.hash_bytes, instance.hash_bytes)
    _require_equal("namespace.model", stimulus.model, instance.model)
    if SessionRole.RANK in stimulus.role and instance.ranks:
        other = next(iter(instance.ranks.values()))
        _require_equal("groups", len(stimulus.groups), len(other.groups))
        for index, (mine, theirs) in enumerate(zip(stimulus.groups, other.groups, strict=True)):
            field = f"groups[{index}]"
            _require_equal(f"{field}.block_tokens", mine.block_tokens, theirs.block_tokens)
            _require_equal(f"{field}.replicated", mine.replicated, theirs.replicated)
            if mine.replicated:
                _require_same_planes(field, mine, theirs)


def _require_same_planes(field: str, mine: GroupGeometry, theirs: GroupGeometry) -> None:
    _require_equal(f"{field}.kind", int(mine.kind), int(theirs.kind))
    _require_equal(f"{field}.window_tokens", mine.window_tokens, theirs.window_tokens)
    _require_equal(f"{field}.planes", len(mine.planes), len(theirs.planes))
    for number, (plane, other) in enumerate(zip(mine.planes, theirs.planes, strict=True)):
        _require_equal(f"{field}.planes[{number}].fragment_bytes", plane[0], other[0])
        _require_equal(f"{field}.planes[{number}].description", plane[1], other[1])


def _require_equal(field: str, mine: object, theirs: object) -> None:
    """None stands for a side that does not say anything about the field."""
    if mine != theirs:
        raise Refusal(
            Reason.FINGERPRINT_MISMATCH,
            f"this process says {_shown(mine, theirs)}, the others of its instance {_shown(theirs, mine)}: "
            "start all of them with the same settings, or give it another instance name",
            field=field,
            value=mine,
        )


def _shown(value: object, other: object) -> str:
    """The value in bounded length, from a little before the first difference."""
    if value is None:
        return "nothing of it"
    text, beside = str(value), str(other)
    common = next((at for at, pair in enumerate(zip(text, beside, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(0, common - SHOWN_BEFORE) if len(text) > SHOWN_CHARACTERS else 0
    shown = text[begin : begin + SHOWN_CHARACTERS]
    return repr("…" * (begin > 0) + shown + "…" * (len(text) > begin + SHOWN_CHARACTERS))


def _check_place(stimulus: AttachSession, instance: Instance) -> None:
    if SessionRole.SCHEDULER in stimulus.role and instance.scheduler is not None:
        raise Refusal(
            Reason.SESSION_EXISTS,
            "this instance has a scheduler that lives: end it first, or use another instance name",
            field="role",
            value=instance.scheduler.session,
        )
    if SessionRole.RANK in stimulus.role and stimulus.rank in instance.ranks:
        raise Refusal(
            Reason.SESSION_EXISTS,
            "a live process of this instance holds this rank: end it first, or use another instance name",
            field="rank",
            value=stimulus.rank,
        )
