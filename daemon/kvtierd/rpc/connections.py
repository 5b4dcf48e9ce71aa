"""Connections: sessions as the rpc layer knows them, with token, peer, stream and silence. The core knows
only their ids.

A session begins with a side connection and attaches with Hello on a stream. It ends at once when either
closes or its process dies, and when it has been silent for too long.
"""

import asyncio
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtierd.cache import Cache, Event, SessionAbout
from kvtierd.core.actions import Attached
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, SessionId
from kvtierd.core.stimuli import AuditReport, GroupGeometry, SessionRole
from kvtierd.logs import logger
from kvtierd.rpc.audits import EnginesMet, refuse_of_ranks
from kvtierd.rpc.hello import Greeting
from kvtierd.rpc.pace import LoopPace
from kvtierd.rpc.peers import PeerProcess
from kvtierd.rpc.queries import Caller

TOKEN_BYTES = 16
OPERATORS_MAX = 16
"""Operators may have so many connections besides `sessions_max`, to ask Admin: no session attaches on
them."""

SHARE = 8
"""How many times what is free a tenant may have of the sessions."""
SILENT_LEAST = 8
"""So many connections may be without a Hello, however few sessions there may be."""

log = logger(__name__)


@dataclass(eq=False, slots=True)
class Connection:
    """One attachment of one process."""

    id: SessionId
    token: bytes
    peer: PeerProcess
    opened_at_s: float
    heard_at_s: float
    spare: Refusal | None = None
    """Why there was no room for it, if an operator has opened it all the same: it cannot attach."""
    on_end: list[Callable[[Refusal], None]] = field(default_factory=list)
    """Functions that are called once, when the session is over: they close the stream and the side
    connection."""
    greeting: Greeting | None = None
    epoch: Epoch | None = None
    ended: Refusal | None = None

    @property
    def groups(self) -> tuple[GroupGeometry, ...]:
        return self.greeting.attach.groups if self.greeting else ()

    def caller(self, epoch: int | None) -> Caller:
        """The caller of this session's requests, in its own epoch unless `epoch` is given. Raises Refusal
        NOT_ATTACHED."""
        if self.greeting is None or self.epoch is None:
            raise Refusal(Reason.NOT_ATTACHED, "attach first: send Hello on an Attach stream")
        return Caller(self.id, self.epoch if epoch is None else Epoch(epoch), self.greeting.attach.hash_bytes)


class Connections:
    """All sessions of the daemon. For use on the event loop only."""

    def __init__(
        self,
        cache: Cache,
        *,
        sessions_max: int,
        hello_deadline_s: float,
        silence_s: float,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared`: users besides the daemon's own and root may connect."""
        self._cache = cache
        self.boot_nonce = cache.boot_nonce
        self._sessions_max = sessions_max
        self._silent_max = max(SILENT_LEAST, sessions_max // 2)
        self._silent_of_user_max = max(SILENT_LEAST, sessions_max // 4)
        self._spare = 0
        self._silent: Counter[int] = Counter()
        """For each user, connections that have not said Hello."""
        self._hello_deadline_s = hello_deadline_s
        self.silence_s = silence_s
        self._clock = clock
        self._by_token: dict[bytes, Connection] = {}
        self._of_tenant: Counter[str] = Counter()
        self._shared = shared
        self.pace = LoopPace(lambda: len(self._of_tenant))
        self._ids = itertools.count(1)
        self._closing = False
        self._engines = EnginesMet(clock)

    def __len__(self) -> int:
        return len(self._by_token)

    def open(self, peer: PeerProcess) -> Connection:
        """A new session of a process that has just connected; takes over `peer.pidfd`. Raises Refusal."""
        if self._closing:
            raise Refusal(Reason.DRAINING, "the daemon is stopping: attach again when it is back")
        refusal = self._refusal(peer)
        if refusal is not None and not (peer.operator and self._spare < OPERATORS_MAX):
            raise refusal
        self._spare += refusal is not None
        self._silent[peer.uid] += 1
        now = self._clock()
        token = secrets.token_bytes(TOKEN_BYTES)
        connection = Connection(SessionId(next(self._ids)), token, peer, now, now, spare=refusal)
        self._by_token[connection.token] = connection
        self._of_tenant[peer.tenant] += 1
        asyncio.get_running_loop().add_reader(
            peer.pidfd, self.end, connection, Refusal(Reason.EPOCH_ENDED, "its process has died")
        )
        return connection

    def _refusal(self, peer: PeerProcess) -> Refusal | None:
        """Why a process may not open another session; None if it may. Where users besides the daemon's own
        may connect, each tenant leaves some for others: it has no more than `SHARE` times what is free."""
        own, free = self._of_tenant[peer.tenant], self._sessions_max - (len(self._by_token) - self._spare)
        if free <= 0 or (self._shared and own and own >= SHARE * (free - 1)):
            return Refusal(
                Reason.QUEUE_FULL,
                f"the daemon serves {self._sessions_max} sessions at once (server.sessions_max, or what its "
                f"limit of open files allows); tenant {peer.tenant!r} has {own} of them, and no more are "
                "left for it",
            )
        of_user, silent = self._silent[peer.uid], self._silent.total()
        if of_user >= self._silent_of_user_max or silent >= self._silent_max:
            return Refusal(
                Reason.QUEUE_FULL,
                f"{silent} connections have not said Hello, {of_user} of them of uid {peer.uid}: at most "
                f"{self._silent_max} and {self._silent_of_user_max} may (by server.sessions_max); each is "
                f"closed after {self._hello_deadline_s:g} s (server.hello_deadline_s)",
            )
        return None

    def by_token(self, token: bytes) -> Connection:
        """The session with this token. Raises Refusal UNKNOWN_TOKEN."""
        connection = self._by_token.get(token)
        if connection is None:
            raise Refusal(
                Reason.UNKNOWN_TOKEN,
                "no session has this token: open the side socket and use the one it issues",
            )
        return connection

    def heard(self, connection: Connection) -> None:
        """Remembers that the session has just sent something."""
        connection.heard_at_s = self._clock()

    def attach(
        self, connection: Connection, greeting: Greeting, listener: Callable[[Event], None]
    ) -> Attached:
        """Attaches a session. Raises Refusal; the session may then send another Hello on another stream."""
        if connection.greeting is not None:
            raise Refusal(Reason.SECOND_HELLO, "a session says Hello once: open another session")
        if connection.spare is not None:
            raise connection.spare
        attach = greeting.attach
        names = {
            SessionRole.SCHEDULER: "scheduler",
            SessionRole.RANK: f"rank {attach.rank}",
            SessionRole.SCHEDULER | SessionRole.RANK: f"scheduler and rank {attach.rank}",
        }
        about = SessionAbout(
            names[attach.role],
            connection.peer.pid,
            greeting.client,
            self._clock(),
            greeting.configuration,
            connection.peer.uid,
        )
        reply = self._cache.attach(attach, about, listener)
        self._spoke(connection)
        connection.greeting = greeting
        connection.epoch = reply.epoch
        if SessionRole.SCHEDULER in attach.role:
            self._engines.add(greeting)
        log.info(
            "session attached",
            session=connection.id,
            instance=attach.instance,
            epoch=reply.epoch,
            role=about.role,
            pid=about.pid,
            client=greeting.client,
        )
        return reply

    def told_audits(self, connection: Connection, reports: tuple[AuditReport, ...]) -> None:
        """Logs what an engine has found in audits. Raises Refusal ROLE unless the session schedules."""
        if reports and connection.greeting is not None:
            refuse_of_ranks(SessionRole.SCHEDULER in connection.greeting.attach.role, reports)
            self._engines.tell(connection.greeting, reports)

    def end(self, connection: Connection, why: Refusal) -> None:
        """Ends a session everywhere. A second call does nothing."""
        if connection.ended is not None:
            return
        connection.ended = why
        del self._by_token[connection.token]
        self._spare -= connection.spare is not None
        self._of_tenant[connection.peer.tenant] -= 1
        if not self._of_tenant[connection.peer.tenant]:
            del self._of_tenant[connection.peer.tenant]
        asyncio.get_running_loop().remove_reader(connection.peer.pidfd)
        os.close(connection.peer.pidfd)
        if connection.greeting is None:
            self._spoke(connection)
        else:
            log.info("session ended", session=connection.id, pid=connection.peer.pid, why=why.message)
            self._cache.end_session(connection.id, why.message)
        for callback in connection.on_end:
            callback(why)
        connection.on_end.clear()

    def _spoke(self, connection: Connection) -> None:
        """A connection is no longer one that has not said Hello."""
        uid = connection.peer.uid
        self._silent[uid] -= 1
        if not self._silent[uid]:
            del self._silent[uid]

    def end_all(self, why: Refusal) -> None:
        """Ends every session, and opens no more."""
        self._closing = True
        for connection in list(self._by_token.values()):
            self.end(connection, why)

    def end_silent(self) -> None:
        """Ends sessions that have sent no Hello, or nothing at all, for too long. Call it about every
        second."""
        now = self._clock()
        for connection in list(self._by_token.values()):
            if connection.greeting is None and now - connection.opened_at_s > self._hello_deadline_s:
                self.end(
                    connection,
                    Refusal(Reason.DEADLINE, f"no Hello within {self._hello_deadline_s:g} s of connecting"),
                )
            elif now - connection.heard_at_s > self.silence_s:
                self.end(connection, Refusal(Reason.DEADLINE, f"silent for {self.silence_s:g} s"))
