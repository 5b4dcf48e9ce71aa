"""What engines have found in audits: they compute some blocks that they could load, and compare the two."""

from collections import OrderedDict
from dataclasses import dataclass

from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.stimuli import AuditReport

MISMATCHES_MAX = 256
"""For how many namespaces the latest mismatch is remembered."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block that was not what an engine computes."""

    at: int
    """When it was found, in units of `Blocks.now`; in an answer, how many seconds ago."""
    engine: str
    report: AuditReport


class Mismatches:
    """The latest mismatch of each namespace."""

    def __init__(self) -> None:
        self._latest: OrderedDict[NamespaceDigest, Mismatch] = OrderedDict()

    def add(self, namespace: NamespaceDigest, mismatch: Mismatch) -> None:
        self._latest[namespace] = mismatch
        self._latest.move_to_end(namespace)
        if len(self._latest) > MISMATCHES_MAX:
            self._latest.popitem(last=False)

    def latest(self, namespace: NamespaceDigest) -> Mismatch | None:
        return self._latest.get(namespace)
