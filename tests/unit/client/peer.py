"""A session on a clock that the test moves, and the daemon's half of the conversation, said by the test."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

from kvtier import Group, Namespace, PartRef, PartState, Plane, Role, SharedBuffer
from kvtier.session.state import ProtocolState
from kvtier.spec import FEATURES, AttachSpec
from kvtier.v1 import cache_pb2, types_pb2
from kvtier.words import WordsPage
from kvtier_kernels import SharedWords

BLOCK_BYTES = 4096
BLOCKS = 64
DOORBELLS = 4
NAMESPACE = Namespace(model="m", kv_dtype="bfloat16", hash_scheme="test", hash_bytes=32)


def plane(**changes: object) -> Plane:
    fields = {"fragment_bytes": BLOCK_BYTES, "base_offset": 0, "block_stride_bytes": BLOCK_BYTES} | changes
    return Plane(**fields)  # type: ignore[arg-type]


def group(*planes: Plane, num_blocks: int = BLOCKS) -> Group:
    return Group(block_tokens=16, num_blocks=num_blocks, planes=planes or (plane(),))


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def worker_words(page: WordsPage) -> SharedWords:
    """The page's words through a mapping of their own."""
    mapping = mmap.mmap(page.buffer.fileno(), 0)
    return SharedWords(mapping, len(mapping) // 8)


def taken_apart(messages: Sequence[cache_pb2.AttachRequest]) -> list[cache_pb2.AttachRequest]:
    """The requests of these messages, in order."""
    return [each for one in messages for each in (one.batch.requests if one.HasField("batch") else [one])]


class Peer:
    """A session and its daemon. `sent()` is what the session wanted to send since the last look."""

    def __init__(self, role: Role = Role.BOTH, *, parts: int = 8, world_size: int = 1) -> None:
        self.now_s = 100.0
        self.worker: SharedWords | None = None
        self.memory = SharedBuffer.create(BLOCKS * BLOCK_BYTES) if role.holds_rank else None
        spec = AttachSpec(
            instance="i",
            namespace=NAMESPACE,
            role=role,
            world_size=world_size,
            groups=(group(),) if role.holds_rank else (),
            memory=self.memory,
            parts=parts,
            doorbells=DOORBELLS,
        )
        self.session = ProtocolState(spec, clock=lambda: self.now_s, make_event=threading.Event)

    def start(self, part: PartRef) -> bool:
        """The worker tries to start a part."""
        assert self.worker is not None
        return self.worker.try_start(DOORBELLS + part.word, part.ticket)

    def finish(self, part: PartRef, state: PartState = PartState.DONE) -> None:
        """The worker ends a part that it has started."""
        assert self.worker is not None
        self.worker.finish(DOORBELLS + part.word, part.ticket, state.value)

    def close(self) -> None:
        self.session.words.close()
        if self.memory is not None:
            self.memory.close()

    def messages(self) -> list[cache_pb2.AttachRequest]:
        """As they are sent: several requests may be in one."""
        return self.session.take_outgoing()

    def sent(self) -> list[cache_pb2.AttachRequest]:
        """The requests, one by one."""
        return taken_apart(self.messages())

    def say(self, request_id: int = 0, **body: object) -> None:
        """The daemon sends one message."""
        self.session.receive(cache_pb2.AttachResponse(id=request_id, **body))  # type: ignore[arg-type]

    def welcome(
        self, epoch: int = 7, *, ready: bool = True, features: Sequence[str] = FEATURES, **limits: int
    ) -> None:
        """Attaches and registers."""
        self.session.say_hello(b"t" * 16, daemon_pid=1)
        [hello] = self.sent()
        given = {
            "lookup_hashes_max": 1000,
            "transfer_blocks_max": 100,
            "transfers_max": 1000,
            "heartbeat_interval_ms": 2000,
            "message_bytes_max": 4 << 20,
        } | limits
        instance = cache_pb2.InstanceEvent(ready=ready)
        self.say(
            hello.id,
            welcome=cache_pb2.Welcome(
                epoch=epoch, features=features, limits=cache_pb2.Limits(**given), instance=instance
            ),
        )
        if self.session.memory.wants_registration:
            self.register()

    def register(self) -> None:
        """Registers words with a worker, which maps them as a copy worker does."""
        self.session.memory.begin()
        page = self.session.memory.new_page()
        self.worker = worker_words(page)
        self.session.memory.registered(registration=5)
        self.session.memory.end()

    def answer_lookup(self, request: cache_pb2.AttachRequest, hits: int, lease_id: int = 0) -> None:
        answer = cache_pb2.GroupAnswer(hits=hits, states=b"\2" * hits)
        self.say(request.id, lookup=cache_pb2.LookupResponse(answers=[answer], lease_id=lease_id))

    def refuse(self, request: cache_pb2.AttachRequest, reason: types_pb2.Reason.ValueType) -> None:
        self.say(request.id, error=types_pb2.Error(reason=reason, message="no"))

    def end(
        self,
        ticket: int,
        state: types_pb2.TransferState.ValueType = types_pb2.TRANSFER_STATE_DONE,
        succeeded: bytes = b"\1",
    ) -> None:
        self.say(transfer=cache_pb2.TransferEvent(ticket=ticket, state=state, succeeded=succeeded))
