"""The worker's core: it takes messages of the front, and reports copies."""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvtier_kernels import PART_DONE, PART_FAILED, PoolRecords

from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import FDS_MAX, BlockingPacketChannel, ChannelEndedError, ProtocolError
from kvtierd.workers.channel.status import StatusPage
from kvtierd.workers.copy.checking import Checker
from kvtierd.workers.copy.device import Copier, Device
from kvtierd.workers.copy.lanes import Lanes, PartCalls
from kvtierd.workers.copy.parts import PartEnd, PartRefusedError, PartTask, PartTaskState, read_part
from kvtierd.workers.copy.sessions import MappedSession
from kvtierd.workers.copy.teardown import Teardown
from kvtierd.workers.log import logger

_log = logger(__name__)

PARTS_MAX = 65_536
"""Unfinished parts. The core's limits stay far below it; beyond it, parts fail instead of using up memory."""

SESSIONS_MAX = 4_096

FDS_SPARE = FDS_MAX + 16
"""Descriptors that stay free, because a packet whose descriptors do not fit would end the worker."""

Mapping = wire.MapWords | wire.MapMemory | wire.AddChunks

_OVERWRITTEN = "its part word was overwritten by somebody else"
_WITHDRAWN = "its client withdrew it while it ran"


class CopyEngine:
    """Sessions, parts and lanes of one worker. `handle` and `stop` are for the main thread only.

    The terminal word of a part is written before the part is reported, and all of a session's parts are
    reported before its SessionReleased.
    """

    def __init__(
        self, device: Device, records: PoolRecords, channel: BlockingPacketChannel, status: StatusPage
    ) -> None:
        self._device = device
        self._channel = channel
        self._sessions: dict[int, MappedSession] = {}
        self._parts: dict[int, PartTask] = {}
        self._lanes = Lanes(device, status, PartCalls(self._start, self._landed, self._end_unstarted))
        self._lock = self._lanes.lock
        self._teardown = Teardown(device, self._unmapped)
        self._checker = Checker(
            records, self.is_busy, lambda answer: self._send(wire.ToFront(slots_checked=answer))
        )
        self.has_landed = False
        """Whether, after `stop`, nothing is left to copy, so that parts only have to be settled."""

    def start(self) -> None:
        self._device.start(self._lanes.wake)
        self._lanes.start()
        self._teardown.start()
        self._checker.start()

    def is_busy(self) -> bool:
        """Whether a part runs or could run. From any thread."""
        return self._lanes.busy

    def handle(self, message: wire.ToWorker, fds: list[int]) -> None:
        """Does what a message says, except Stop. The descriptors stay the caller's. Raises ProtocolError."""
        kind = message.WhichOneof("body")
        if len(fds) != _descriptors(message, kind):
            raise ProtocolError(f"a {kind} message with {len(fds)} descriptors")
        match kind:
            case "map_words":
                words = message.map_words
                self._map(words, lambda session: _map_words(session, fds[0], words))
            case "map_memory":
                memory = message.map_memory
                self._map(memory, lambda session: session.map_memory(self._device, fds, memory))
            case "add_chunks":
                chunks = message.add_chunks
                self._map(chunks, lambda session: session.add_chunks(self._device, fds, chunks.bytes))
            case "post_part":
                self._post_part(message.post_part)
            case "revoke_part":
                self._revoke_part(message.revoke_part.part)
            case "check_slots":
                self._check_slots(message.check_slots)
            case "release_session":
                self._release_session(message.release_session.session)
            case _:
                raise ProtocolError(f"a message of kind {kind}")

    def stop(self) -> None:
        """Revokes parts that have not started, and lets the lanes end after those that have."""
        self._checker.stop()
        with self._lock:
            unstarted = self._lanes.withdraw(lambda part: True)
            self._lanes.stop()
        for part in unstarted:
            self._end_unstarted(part)

    def join(self, timeout_s: float) -> bool:
        """Waits, after `stop`, until every part that had started has been reported; False if some have not.

        The sessions stay mapped. The end of the process unmaps them.
        """
        if not self._lanes.join(timeout_s) or not self._checker.join(timeout_s):
            return False
        if not self.has_landed:
            self.has_landed = True
            self._device.stop()
        return self._device.join(timeout_s)

    def _map(self, asked: Mapping, mapper: Callable[[MappedSession], None]) -> None:
        try:
            session = self._session_to_map(asked.session)
            # This may take a while, so the lock is not held. Only this thread maps and releases sessions.
            mapper(session)
        except Refusal as refusal:
            refused = wire.MapRefused(
                request=asked.request,
                reason=int(refusal.reason),
                field=refusal.field,
                value=refusal.value,
                message=refusal.message,
            )
            answer = wire.ToFront(map_refused=refused)
        else:
            with self._lock:
                self._sessions[asked.session] = session
            answer = wire.ToFront(mapped=wire.Mapped(request=asked.request))
        self._send(answer)

    def _session_to_map(self, number: int) -> MappedSession:
        refusal = partial(Refusal, field="session", value=number)
        with self._lock:
            session = self._sessions.get(number)
            sessions = len(self._sessions)
        if session is not None and session.releases:
            raise refusal(
                Reason.ALREADY_REGISTERED, "this session is being released; map again when that is done"
            )
        if session is None and sessions >= SESSIONS_MAX:
            raise refusal(Reason.QUEUE_FULL, f"a copy worker serves at most {SESSIONS_MAX} sessions")
        # Every mapping holds a descriptor.
        fds_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(os.listdir("/proc/self/fd")) > fds_max - FDS_SPARE:
            raise refusal(
                Reason.QUEUE_FULL,
                f"the copy worker has mapped as much as {fds_max} descriptors allow: "
                "raise the daemon's limit of open files",
            )
        return session or MappedSession(number)

    def _post_part(self, message: wire.PostPart) -> None:
        with self._lock:
            if message.part in self._parts:
                raise ProtocolError(f"part {message.part} was posted twice")
            session = self._sessions.get(message.session)
            try:
                if session is None or session.words is None or session.releases:
                    session = None
                    raise PartRefusedError(f"session={message.session}: no words of it are mapped")
                if len(self._parts) >= PARTS_MAX:
                    raise PartRefusedError(f"a copy worker keeps at most {PARTS_MAX} unfinished parts")
                part = read_part(message, session, time.monotonic())
            except PartRefusedError as error:
                refused = str(error)
            else:
                self._parts[part.number] = part
                session.unfinished += 1
                self._lanes.submit(part)
                return
            if session is not None:
                session.revoke_word(message.part_word, message.ticket)
        _log.error("a part was refused", part=message.part, why=refused)
        self._report(message.part, PartEnd(wire.FAILED, refused))

    def _revoke_part(self, number: int) -> None:
        with self._lock:
            part = self._parts.get(number)
            if part is None or part.state is not PartTaskState.QUEUED:
                return  # it is over, or runs: its report is under way, or follows
            withdrawn = self._lanes.withdraw(lambda other: other is part)
        for queued in withdrawn:
            self._end_unstarted(queued)

    def _check_slots(self, message: wire.CheckSlots) -> None:
        if len(message.slots) % 4 or len(message.generations) != 2 * len(message.slots):
            raise ProtocolError("a check whose slots and generations are not parallel")
        self._checker.ask(message)

    def _release_session(self, number: int) -> None:
        with self._lock:
            session = self._sessions.get(number)
            if session is not None:
                session.releases += 1
                withdrawn = self._lanes.withdraw(lambda part: part.session is session)
                self._lanes.abandon(part for part in self._parts.values() if part.session is session)
        if session is None:
            self._send_released(number)
            return
        for part in withdrawn:
            self._end_unstarted(part)
        self._unmap_if_fenced(session)

    def _start(self, part: PartTask) -> bool:
        return part.session.try_start(part.word, part.ticket)

    def _landed(self, copier: Copier, part: PartTask, end: PartEnd) -> None:
        """Writes the terminal word of a started part that has landed. Its report follows when it is
        settled."""
        state = PART_DONE if end.outcome == wire.DONE else PART_FAILED
        if not part.session.finish(part.word, part.ticket, state, is_load=part.is_load):
            if part.is_load:
                end = replace(end, message=_OVERWRITTEN)
            else:
                # Its client took the blocks back, so some of what was read may have been written after that.
                end = PartEnd(wire.REVOKED, _WITHDRAWN, copy_ns=end.copy_ns)
        copier.settle(part, end, partial(self._over, part))

    def _end_unstarted(self, part: PartTask) -> None:
        """Ends a part that is in no queue and never started."""
        outcome = wire.REVOKED
        if part.doorbell is not None and part.gate_deadline_s <= time.monotonic():
            is_revoked = part.session.is_revoked(part.word, part.ticket)
            outcome = wire.REVOKED if is_revoked else wire.GATE_DEADLINE
        as_expected = part.session.revoke(part.word, part.ticket)
        self._over(part, PartEnd(outcome, "" if as_expected else _OVERWRITTEN))

    def _over(self, part: PartTask, end: PartEnd) -> None:
        """Reports a part whose word is terminal, and forgets it."""
        part.plan = None
        self._report(part.number, end)
        with self._lock:
            part.state = PartTaskState.OVER
            del self._parts[part.number]
            part.session.unfinished -= 1
        self._unmap_if_fenced(part.session)

    def _unmap_if_fenced(self, session: MappedSession) -> None:
        """Has a session unmapped that is being released, if nothing of it can still run."""
        with self._lock:
            if not session.releases or session.unfinished or session.is_fenced:
                return
            session.fence()
        self._teardown.add(session)

    def _unmapped(self, session: MappedSession) -> None:
        with self._lock:
            del self._sessions[session.number]
            answers = session.releases
        if session.overwritten_words:
            _log.warning(
                "part words were overwritten", session=session.number, words=session.overwritten_words
            )
        for _ in range(answers):
            self._send_released(session.number)

    def _report(self, number: int, end: PartEnd) -> None:
        finished = wire.PartFinished(
            part=number,
            outcome=end.outcome,
            failed=end.failed.astype("<u4").tobytes(),
            corrupt=end.corrupt,
            copied_bytes=end.copied_bytes,
            copy_ns=end.copy_ns,
            message=end.message[:1_000],
        )
        self._send(wire.ToFront(part_finished=finished))

    def _send_released(self, number: int) -> None:
        self._send(wire.ToFront(session_released=wire.SessionReleased(session=number)))

    def _send(self, message: wire.ToFront) -> None:
        try:
            self._channel.send(message.SerializeToString())
        except ChannelEndedError:
            # The front is gone, as the main thread sees from the channel. Clients have the part words.
            pass


def _map_words(session: MappedSession, fd: int, words: wire.MapWords) -> None:
    session.tenant = words.tenant
    session.map_words(fd, words.doorbells, words.parts)


def _descriptors(message: wire.ToWorker, kind: str | None) -> int:
    """How many descriptors a message comes with."""
    match kind:
        case "map_words":
            return 1
        case "map_memory":
            return 0 if message.map_memory.ranges else 1
        case "add_chunks":
            return len(message.add_chunks.bytes)
        case _:
            return 0
