"""The classes into which every setting of an engine is put. Nothing here knows which engine it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SettingKind(Enum):
    """What a setting has to do with the bytes of a block."""

    IDENTITY = "in the identity"
    """The setting may change them, so engines that differ in it share nothing."""
    ELSEWHERE = "in the identity in another form, or refused"
    ROUNDING = "only reorders floating-point sums"
    """Engines that differ in it share blocks: what one loads from the other is as good as what it would
    compute, but not the same bit for bit."""
    HARMLESS = "cannot change them"


@dataclass(frozen=True)
class Classification:
    """Why settings are classed as they are."""

    kind: SettingKind
    why: str
    """A sentence about the settings."""


IDENTITY = Classification(
    SettingKind.IDENTITY, "They may change what is computed, or they are not understood well enough."
)
DRAFT = Classification(
    SettingKind.IDENTITY,
    "They may change the KV of a draft model, where it lies in the same blocks as the model's.",
)
PART = Classification(SettingKind.ELSEWHERE, "They are made of fields that are classed one by one.")
ELSEWHERE = Classification(
    SettingKind.ELSEWHERE,
    "They have a field of the namespace of their own, are named in another form, or are refused where they "
    "cannot be named.",
)
DERIVED = Classification(
    SettingKind.HARMLESS,
    "They follow from the model's files and from other settings, which are in the identity; the class of a "
    "model may write into them while it is built.",
)
LAYOUT = Classification(
    SettingKind.HARMLESS,
    "They decide how blocks are cut and laid out, which the fingerprint of the layout and the block hashes "
    "say.",
)
ROUNDING = Classification(
    SettingKind.ROUNDING,
    "They select kernels, graphs, and how work is split and joined: sums in another order.",
)
PLACEMENT = Classification(
    SettingKind.HARMLESS,
    "They decide where and when something is kept, moved or computed, and how much at once, not what.",
)
PROCESSES = Classification(
    SettingKind.HARMLESS, "They are about processes, hosts, ports and what passes between them."
)
FILES = Classification(
    SettingKind.HARMLESS,
    "They are about where files are found, built or cached, and how they are read; what is in those that "
    "decide values is in the identity.",
)
FRONT_END = Classification(
    SettingKind.HARMLESS,
    "They are about how requests become tokens and media, which the block hashes cover once they have.",
)
OUTPUT = Classification(
    SettingKind.HARMLESS, "They are about what is made of the last hidden states: no KV depends on it."
)
WATCHING = Classification(SettingKind.HARMLESS, "They are about logs, metrics, events and debugging.")
OWN_CODE = Classification(
    SettingKind.ROUNDING,
    "They run code of the user's own, which is taken to compute what the model says: if it does not, set "
    "weights_revision or salt.",
)
