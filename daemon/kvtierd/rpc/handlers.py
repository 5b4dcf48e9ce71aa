"""Makes the gRPC handlers of a service from a table of functions. What a method takes, returns and streams is
read from the service's description."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvtierd.core.errors import Refusal
from kvtierd.rpc.errors import abort
from kvtierd.rpc.guard import Undecodable, decoder

Serve = Callable[[Any, Any], Any]
"""Answers one call, given a request (or `Undecodable`) and a context, as grpc.aio wants it."""

_KINDS: dict[tuple[bool, bool], Callable[..., "grpc.RpcMethodHandler[Any, Any]"]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the client streams, and whether the daemon does."""


def generic_handler(
    service: ServiceDescriptor, serve: Mapping[str, Serve], bytes_max: int
) -> grpc.GenericRpcHandler:
    """The handler of a whole service; `serve` has all of its methods. The generated handlers are not used
    because they would fix the deserialiser."""
    assert set(serve) == set(service.methods_by_name), "every method has its function"
    methods = {name: _handler(service.methods_by_name[name], call, bytes_max) for name, call in serve.items()}
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _handler(method: MethodDescriptor, serve: Serve, bytes_max: int) -> "grpc.RpcMethodHandler[Any, Any]":
    return _KINDS[method.client_streaming, method.server_streaming](
        serve,
        request_deserializer=decoder(GetMessageClass(method.input_type), bytes_max),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def answering(call: Serve) -> Serve:
    """Serves a function or coroutine that takes a request and its context, and returns the response. A
    Refusal ends the call."""

    async def serve(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Undecodable):
                raise request.refusal
            response = call(request, context)
            return await response if isinstance(response, Awaitable) else response
        except Refusal as refusal:
            await abort(context, refusal)

    return serve


def streaming(call: Serve) -> Serve:
    """Serves an asynchronous generator of responses in the same way."""

    async def serve(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Undecodable):
                raise request.refusal
            async with contextlib.aclosing(call(request, context)) as responses:
                async for response in responses:
                    yield response
        except Refusal as refusal:
            await abort(context, refusal)

    return serve
