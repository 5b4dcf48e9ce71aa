"""What each call does, for the stream and for the unary services: convert, ask the façade, convert back."""

import time
from collections.abc import Callable
from typing import Any

from kvtier.v1 import cache_pb2, types_pb2

from kvtierd.cache import Cache
from kvtierd.core.actions import LookupReply, SubmitReply
from kvtierd.core.errors import Refusal
from kvtierd.core.stimuli import CoreLimits
from kvtierd.logs import logger
from kvtierd.rpc import replies, requests
from kvtierd.rpc.queries import Caller

TELL_EVERY_S = 60.0
"""Time between two lines of the log about leases that are too small."""

log = logger(__name__)


class Calls:
    """The calls of `kvtier.v1.Cache`, except for Attach. All of them raise Refusal, and then nothing has
    changed."""

    def __init__(self, cache: Cache, limits: CoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._told_s = -TELL_EVERY_S
        """When the log last said that leases are too small."""
        self.by_body: dict[str, Callable[[Any, Caller], tuple[str, Any]]] = {
            "lookup": lambda request, caller: ("lookup", self.lookup(request, caller)),
            "touch": lambda request, caller: ("touch", self.touch(request, caller)),
            "prefetch": lambda request, caller: ("prefetch", self.prefetch(request, caller)),
            "store": lambda request, caller: ("submit", self.store(request, caller)),
            "load": lambda request, caller: ("submit", self.load(request, caller)),
            "release": lambda request, caller: ("release", self.release(request, caller)),
            "cancel": lambda request, caller: ("cancel", self.cancel(request, caller)),
        }
        """By a request's field in AttachRequest: returns the field in AttachResponse, and the reply."""
        self.by_method: dict[str, Callable[[Any, Caller], Any]] = {
            "Lookup": self.lookup,
            "Touch": self.touch,
            "Prefetch": self.prefetch,
            "Store": self.store,
            "Load": self.load,
            "Release": self.release,
            "Cancel": self.cancel,
            "Wait": self.wait,
        }
        """By the name of a unary call."""

    def lookup(self, request: cache_pb2.LookupRequest, caller: Caller) -> cache_pb2.LookupResponse:
        stimulus = requests.lookup_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        assert isinstance(reply, LookupReply)
        if reply.lease_refused is not None:
            self._tell(caller, reply.lease_refused)
        return replies.lookup_reply(stimulus.queries, reply)

    def _tell(self, caller: Caller, refused: Refusal) -> None:
        """Logs that blocks were there but not leased, at most once every `TELL_EVERY_S`. The core counts all
        of them."""
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning(
                "a lookup found more than it could lease", epoch=int(caller.epoch), why=refused.message
            )

    def touch(self, request: cache_pb2.TouchRequest, caller: Caller) -> cache_pb2.TouchResponse:
        self._cache.handle(requests.touch_of(request, caller, self._limits))
        return cache_pb2.TouchResponse()

    def prefetch(self, request: cache_pb2.PrefetchRequest, caller: Caller) -> cache_pb2.PrefetchResponse:
        stimulus = requests.prefetch_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        assert isinstance(reply, LookupReply)
        return replies.prefetch_reply(stimulus.queries, reply)

    def store(self, request: cache_pb2.StoreRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        reply = self._cache.handle(requests.store_of(request, caller, self._limits))
        assert isinstance(reply, SubmitReply)
        return replies.submit_reply(self._cache.boot_nonce, reply)

    def load(self, request: cache_pb2.LoadRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        reply = self._cache.handle(requests.load_of(request, caller, self._limits))
        assert isinstance(reply, SubmitReply)
        return replies.submit_reply(self._cache.boot_nonce, reply)

    def release(self, request: cache_pb2.ReleaseRequest, caller: Caller) -> cache_pb2.ReleaseResponse:
        self._cache.handle(requests.release_of(request, caller, self._limits))
        return cache_pb2.ReleaseResponse()

    def cancel(self, request: cache_pb2.CancelRequest, caller: Caller) -> cache_pb2.CancelResponse:
        self._cache.handle(requests.cancel_of(request, caller, self._limits))
        return cache_pb2.CancelResponse()

    async def wait(self, request: cache_pb2.WaitRequest, caller: Caller) -> cache_pb2.WaitResponse:
        tickets = requests.waited_for(request)
        timeout_s = requests.wait_timeout_s(request)
        ended = await self._cache.wait(caller.session, caller.epoch, tickets, timeout_s)
        events = [
            cache_pb2.TransferEvent(ticket=ticket, state=types_pb2.TRANSFER_STATE_ACTIVE)
            if event is None
            else replies.transfer_event(self._cache.boot_nonce, event)
            for ticket, event in zip(tickets, ended, strict=True)
        ]
        return cache_pb2.WaitResponse(transfers=events)
