"""Messages of the wire, made from the core's replies and events. Nothing is checked, because the core's
values are sound."""

from collections.abc import Sequence

from kvtier.v1 import cache_pb2, types_pb2

from kvtierd.core.actions import InstanceView, LookupReply, SubmitReply, TransferEnd, TransferEnded
from kvtierd.core.ids import TransferNumber
from kvtierd.core.stimuli import BlockQuery
from kvtierd.rpc.errors import to_error

_END = {
    TransferEnd.DONE: types_pb2.TRANSFER_STATE_DONE,
    TransferEnd.FAILED: types_pb2.TRANSFER_STATE_FAILED,
    TransferEnd.CANCELLED: types_pb2.TRANSFER_STATE_CANCELLED,
}


def lookup_reply(queries: Sequence[BlockQuery], reply: LookupReply) -> cache_pb2.LookupResponse:
    response = cache_pb2.LookupResponse(answers=_answers(queries, reply))
    if _by_itself(queries):
        response.lease_id = reply.groups[0].lease or 0
    if reply.lease_refused is not None:
        response.lease_refused.CopyFrom(to_error(reply.lease_refused))
    return response


def prefetch_reply(queries: Sequence[BlockQuery], reply: LookupReply) -> cache_pb2.PrefetchResponse:
    return cache_pb2.PrefetchResponse(answers=_answers(queries, reply))


def submit_reply(boot_nonce: int, reply: SubmitReply) -> cache_pb2.SubmitResponse:
    return cache_pb2.SubmitResponse(
        transfer=_transfer_id(boot_nonce, reply.transfer), results=reply.results.tobytes()
    )


def transfer_event(boot_nonce: int, event: TransferEnded) -> cache_pb2.TransferEvent:
    message = cache_pb2.TransferEvent(
        transfer=_transfer_id(boot_nonce, event.transfer),
        ticket=event.ticket,
        state=_END[event.end],
        succeeded=event.succeeded.tobytes(),
    )
    if event.error is not None:
        message.error.CopyFrom(to_error(event.error))
    return message


def instance_event(view: InstanceView) -> cache_pb2.InstanceEvent:
    return cache_pb2.InstanceEvent(
        ready=view.ready,
        missing_ranks=view.missing_ranks,
        namespace_digest=view.namespace.hex() if view.namespace else "",
        reregister_ranks=view.reregister_ranks,
        prefix_tokens_max=view.prefix_tokens_max,
    )


def _by_itself(queries: Sequence[BlockQuery]) -> bool:
    """Whether the answer has the form for a single query in prefix or exact mode: it needs no lease for each
    group, and says no more than where a prefix ends."""
    return len(queries) == 1 and not queries[0].window_blocks


def _answers(queries: Sequence[BlockQuery], reply: LookupReply) -> list[cache_pb2.GroupAnswer]:
    if _by_itself(queries):
        query, [found] = queries[0], reply.groups
        states = found.states if query.exact else found.up_to_first_miss(len(query.hashes))
        answer = cache_pb2.GroupAnswer(
            group=query.group, hits=found.hits, states=states.tobytes(), readable=found.readable
        )
        return [answer]
    return [
        cache_pb2.GroupAnswer(
            group=query.group,
            hits=found.hits,
            states=found.states.tobytes(),
            lease_id=found.lease or 0,
            lease_first=found.lease_first,
        )
        for query, found in zip(queries, reply.groups, strict=True)
    ]


def _transfer_id(boot_nonce: int, number: TransferNumber) -> types_pb2.TransferId:
    return types_pb2.TransferId(boot_nonce=boot_nonce, number=number)
