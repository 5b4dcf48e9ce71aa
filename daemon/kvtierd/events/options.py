"""What is configured for KV events. It needs none of their libraries."""

import re
import socket
from dataclasses import dataclass

from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import DiskId, NamespaceDigest

PLACEHOLDERS = ("host", "model", "namespace")
"""What may stand in braces in a topic."""


@dataclass(frozen=True, slots=True)
class EventOptions:
    """What is configured."""

    endpoint: str
    replay_endpoint: str
    """Empty: there are no replays."""
    topic: str
    """With {host}, {model} and {namespace} in it."""
    host: str
    """Empty: the host's name."""
    replay_batches: int
    replay_bytes: int
    subscriber_queue: int
    """Batches that may wait for one subscriber."""
    heartbeat_s: float
    """After so long without a batch, a stream gets an empty one."""
    whole_hashes: bool
    positional: bool
    store: DiskId | None
    """Which of what is below the host is the store, if there is one."""

    def topic_of(self, namespace: NamespaceDigest, about: NamespaceAbout) -> bytes:
        """The topic of a namespace's stream."""
        values = (self.host or socket.gethostname(), about.model, namespace.hex())
        filled = dict(zip(PLACEHOLDERS, values, strict=True))
        # Not by one replacement after another, because a model's name may have braces.
        return re.sub(r"\{(\w+)\}", lambda found: filled.get(found[1], found[0]), self.topic).encode()
