"""How many descriptors (open files) a daemon needs, and how many of them clients may take, so that there are
always some for what serves them all."""

import math
from dataclasses import dataclass

from kvtierd.config.daemon import Config

OF_OUR_OWN = 256
"""For sockets, metrics, health checks, the pool and logs."""
RESERVE = 64
"""For workers: they are held, and let go while a worker is started."""
PER_DISK = 8
"""A disk's image, and its worker's channel and pidfd, twice during a replacement."""
REMOTE_CONNECTIONS = 64
"""Connections of routers and schedulers on other hosts."""
EVENT_SUBSCRIBERS = 128
"""Connections of those who read KV events, and ask for replays."""
PER_SESSION = 4
"""A side connection, a pidfd, and two connections of gRPC."""
PAGES = 512
"""Index pages."""
IN_TRANSIT = 1_024
"""Descriptors that clients have sent and that are not mapped yet: 16 ranks that register a GPU's memory at
once send 64 each. Their workers get as many."""
IN_ONE_PACKET = 64


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """What clients may take."""

    sessions: int
    """Connections on the side socket."""
    connections: int
    """Connections of gRPC."""
    pages: int
    in_transit: int


def descriptors_wanted(config: Config) -> int:
    """How many files a daemon has open when it serves all that its configuration allows."""
    return _of_daemon(config) + _of_clients(config)


def shares_within(config: Config, limit: float) -> DescriptorShares:
    """What clients may take of a daemon that may have `limit` files open. If that is less than wanted, all of
    them are given proportionally less, and never so little that nobody is served."""
    part = min(1.0, max(0.0, (limit - _of_daemon(config)) / _of_clients(config)))
    sessions = max(4, math.floor(part * config.server.sessions_max))
    return DescriptorShares(
        sessions=min(sessions, config.server.sessions_max),
        connections=2 * sessions,
        pages=max(4, math.floor(part * PAGES)),
        in_transit=max(IN_ONE_PACKET, math.floor(part * IN_TRANSIT)),
    )


def _of_daemon(config: Config) -> int:
    remote = REMOTE_CONNECTIONS if config.remote.on else 0
    events = EVENT_SUBSCRIBERS if config.events.on else 0
    return OF_OUR_OWN + RESERVE + len(config.disk.paths) * PER_DISK + remote + events


def _of_clients(config: Config) -> int:
    return config.server.sessions_max * PER_SESSION + PAGES + 2 * IN_TRANSIT
