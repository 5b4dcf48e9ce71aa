"""What each call does, for the stream and the unary services: convert, ask the façade, convert back."""

from collections.abc import Callable
from typing import Any

from kvtier.v1 import cache_pb2, types_pb2

from kvtierd.cache import Cache
from kvtierd.core.actions import JointReply, LookupReply, PrefetchReply, SubmitReply
from kvtierd.core.stimuli import CoreLimits, LookupGroups, PrefetchGroups
from kvtierd.rpc import convert
from kvtierd.rpc.queries import Caller


class Calls:
    """The calls of `kvtier.v1.Cache`, but for Attach. All raise Refusal, and nothing has changed then."""

    def __init__(self, cache: Cache, limits: CoreLimits) -> None:
        self._cache = cache
        self._limits = limits
        self.by_body: dict[str, Callable[[Any, Caller], tuple[str, Any]]] = {
            "lookup": lambda request, caller: ("lookup", self.lookup(request, caller)),
            "touch": lambda request, caller: ("touch", self.touch(request, caller)),
            "prefetch": lambda request, caller: ("prefetch", self.prefetch(request, caller)),
            "store": lambda request, caller: ("submit", self.store(request, caller)),
            "load": lambda request, caller: ("submit", self.load(request, caller)),
            "release": lambda request, caller: ("release", self.release(request, caller)),
            "cancel": lambda request, caller: ("cancel", self.cancel(request, caller)),
        }
        """By a request's field in AttachRequest: gives the reply and its field in AttachResponse."""

    def lookup(self, request: cache_pb2.LookupRequest, caller: Caller) -> cache_pb2.LookupResponse:
        stimulus = convert.lookup_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        if isinstance(stimulus, LookupGroups):
            assert isinstance(reply, JointReply)
            return convert.joint_reply(stimulus.queries, reply)
        assert isinstance(reply, LookupReply)
        return convert.lookup_reply(stimulus.group, reply)

    def touch(self, request: cache_pb2.TouchRequest, caller: Caller) -> cache_pb2.TouchResponse:
        self._cache.handle(convert.touch_of(request, caller, self._limits))
        return cache_pb2.TouchResponse()

    def prefetch(self, request: cache_pb2.PrefetchRequest, caller: Caller) -> cache_pb2.PrefetchResponse:
        stimulus = convert.prefetch_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        if isinstance(stimulus, PrefetchGroups):
            assert isinstance(reply, JointReply)
            return convert.joint_prefetch_reply(stimulus.queries, reply)
        assert isinstance(reply, PrefetchReply)
        return convert.prefetch_reply(stimulus, reply)

    def store(self, request: cache_pb2.StoreRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        reply = self._cache.handle(convert.store_of(request, caller, self._limits))
        assert isinstance(reply, SubmitReply)
        return convert.submit_reply(self._cache.boot_nonce, reply)

    def load(self, request: cache_pb2.LoadRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        reply = self._cache.handle(convert.load_of(request, caller, self._limits))
        assert isinstance(reply, SubmitReply)
        return convert.submit_reply(self._cache.boot_nonce, reply)

    def release(self, request: cache_pb2.ReleaseRequest, caller: Caller) -> cache_pb2.ReleaseResponse:
        self._cache.handle(convert.release_of(request, caller, self._limits))
        return cache_pb2.ReleaseResponse()

    def cancel(self, request: cache_pb2.CancelRequest, caller: Caller) -> cache_pb2.CancelResponse:
        self._cache.handle(convert.cancel_of(request, caller, self._limits))
        return cache_pb2.CancelResponse()

    async def wait(self, request: cache_pb2.WaitRequest, caller: Caller) -> cache_pb2.WaitResponse:
        tickets = convert.waited_for(request)
        timeout_s = convert.wait_timeout_s(request)
        ended = await self._cache.wait(caller.session, caller.epoch, tickets, timeout_s)
        events = [
            cache_pb2.TransferEvent(ticket=ticket, state=types_pb2.TRANSFER_STATE_ACTIVE)
            if event is None
            else convert.transfer_event(self._cache.boot_nonce, event)
            for ticket, event in zip(tickets, ended, strict=True)
        ]
        return cache_pb2.WaitResponse(transfers=events)
