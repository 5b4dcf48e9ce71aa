"""What engines have found in audits: of some blocks that they could load they compute what they store, and
compare the two."""

from collections import OrderedDict
from dataclasses import dataclass

from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.stimuli import AuditReport

MISMATCHES_MAX = 256
"""Namespaces of which the latest mismatch is remembered."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block that was not what an engine computes."""

    at: int
    """In the unit of the table's recency; of an answer, seconds ago."""
    engine: str
    report: AuditReport


class Mismatches:
    """The latest of each namespace."""

    def __init__(self) -> None:
        self._latest: OrderedDict[NamespaceDigest, Mismatch] = OrderedDict()

    def add(self, namespace: NamespaceDigest, mismatch: Mismatch) -> None:
        self._latest[namespace] = mismatch
        self._latest.move_to_end(namespace)
        if len(self._latest) > MISMATCHES_MAX:
            self._latest.popitem(last=False)

    def latest(self, namespace: NamespaceDigest) -> Mismatch | None:
        return self._latest.get(namespace)
