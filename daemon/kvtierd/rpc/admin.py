"""The Admin service, except for drains: how operators' calls are answered. All of them raise Refusal."""

from kvtier.v1 import admin_pb2

from kvtierd.cache import Cache
from kvtierd.config.reload import Reload
from kvtierd.config.settings import ConfigError
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.draining import Draining
from kvtierd.rpc.explaining import explain_response
from kvtierd.rpc.handlers import Serve, answering, streaming
from kvtierd.rpc.status import (
    AboutDaemon,
    clear_response,
    namespaces_response,
    reload_response,
    status_response,
)


class AdminCalls:
    def __init__(self, cache: Cache, about: AboutDaemon, draining: Draining, reload: Reload) -> None:
        self._cache = cache
        self._reload = reload
        self.by_method: dict[str, Serve] = {
            "Status": answering(lambda _: status_response(about, cache.snapshot())),
            "Drain": streaming(draining.drain),
            "Resume": answering(draining.resume),
            "Explain": answering(self.explain),
            "Scrub": answering(lambda _: admin_pb2.ScrubResponse(paths=cache.scrub())),
            "Clear": answering(self.clear),
            "ListNamespaces": answering(self.namespaces),
            "Reload": answering(self.reload),
        }

    async def namespaces(self, request: admin_pb2.ListNamespacesRequest) -> admin_pb2.ListNamespacesResponse:
        return await namespaces_response(self._cache.namespaces(request.namespace))

    async def explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        group = request.group if request.HasField("group") else None
        explained = self._cache.explain(request.hash, request.namespace, group)
        return await explain_response(explained, self._cache.uptime_s)

    async def clear(self, request: admin_pb2.ClearRequest) -> admin_pb2.ClearResponse:
        return clear_response(await self._cache.clear(request.namespace, request.timeout_ms / 1000))

    def reload(self, request: admin_pb2.ReloadRequest) -> admin_pb2.ReloadResponse:
        try:
            return reload_response(self._reload())
        except ConfigError as error:
            raise Refusal(Reason.MALFORMED, f"{error}; nothing has changed", field=error.field) from error
