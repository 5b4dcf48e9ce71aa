"""The Admin service, except for drains and recordings: how the calls of operators and viewers are answered.
All of them raise Refusal."""

from collections.abc import Callable
from typing import Any

from kvtier.v1 import admin_pb2

from kvtierd.cache import Cache
from kvtierd.config.reload import Reload
from kvtierd.config.settings import ConfigError
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.authority import Authority, Viewer
from kvtierd.rpc.draining import Draining
from kvtierd.rpc.explaining import explain_response
from kvtierd.rpc.handlers import Serve, answering, streaming
from kvtierd.rpc.recordings import Recordings
from kvtierd.rpc.status import (
    AboutDaemon,
    clear_response,
    namespaces_response,
    reload_response,
    status_response,
)


class AdminCalls:
    def __init__(
        self,
        cache: Cache,
        about: AboutDaemon,
        authority: Authority,
        draining: Draining,
        recordings: Recordings,
        reload: Reload,
    ) -> None:
        self._cache = cache
        self._about = about
        self._authority = authority
        self._reload = reload
        self.by_method: dict[str, Serve] = {
            "Status": self._seen(self.status),
            "Explain": self._seen(self.explain),
            "ListNamespaces": self._seen(self.namespaces),
            "Drain": streaming(self._ordered("Drain", draining.drain)),
            "Resume": answering(self._ordered("Resume", draining.resume)),
            "Scrub": answering(self._ordered("Scrub", self.scrub)),
            "Clear": answering(self._ordered("Clear", self.clear)),
            "Reload": answering(self._ordered("Reload", self.reload)),
            "Record": streaming(self._ordered("Record", recordings.record)),
        }

    def _seen(self, call: Callable[[Any, Viewer], Any]) -> Serve:
        """A call that anybody may make, and whose answer depends on who asks."""
        return answering(lambda request, context: call(request, self._authority.viewer(context)))

    def _ordered(self, name: str, call: Callable[[Any], Any]) -> Serve:
        """A call that only operators may make."""

        def serve(request: Any, context: Any) -> Any:
            self._authority.operator(context, name)
            return call(request)

        return serve

    async def status(self, request: admin_pb2.StatusRequest, viewer: Viewer) -> admin_pb2.StatusResponse:
        return await status_response(self._about, self._cache.snapshot(), viewer)

    async def namespaces(
        self, request: admin_pb2.ListNamespacesRequest, viewer: Viewer
    ) -> admin_pb2.ListNamespacesResponse:
        return await namespaces_response(self._cache.namespaces(request.namespace, viewer.tenant))

    async def explain(self, request: admin_pb2.ExplainRequest, viewer: Viewer) -> admin_pb2.ExplainResponse:
        group = request.group if request.HasField("group") else None
        explained = self._cache.explain(request.hash, request.namespace, group, viewer.tenant)
        return await explain_response(explained, self._cache.uptime_s)

    def scrub(self, request: admin_pb2.ScrubRequest) -> admin_pb2.ScrubResponse:
        return admin_pb2.ScrubResponse(paths=self._cache.scrub())

    async def clear(self, request: admin_pb2.ClearRequest) -> admin_pb2.ClearResponse:
        return clear_response(await self._cache.clear(request.namespace, request.timeout_ms / 1000))

    def reload(self, request: admin_pb2.ReloadRequest) -> admin_pb2.ReloadResponse:
        try:
            return reload_response(self._reload())
        except ConfigError as error:
            raise Refusal(Reason.MALFORMED, f"{error}; nothing has changed", field=error.field) from error
