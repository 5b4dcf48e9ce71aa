"""The gRPC server: the session stream, the unary calls, Admin, health and reflection, on one Unix socket."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvtier.v1 import admin_pb2, cache_pb2

from kvtierd.cache import Cache
from kvtierd.config.daemon import ServerConfig
from kvtierd.config.reload import Reload
from kvtierd.core.stimuli import CoreLimits
from kvtierd.rpc.admin import AdminCalls
from kvtierd.rpc.authority import Authority
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.connections import Connections
from kvtierd.rpc.draining import Draining
from kvtierd.rpc.guard import HARD_LIMIT_FACTOR
from kvtierd.rpc.handlers import Serve, answering, generic_handler
from kvtierd.rpc.health import LIVE, HealthServer, bounded, status_of
from kvtierd.rpc.peers import PeerRules
from kvtierd.rpc.queries import Caller
from kvtierd.rpc.recordings import Recordings
from kvtierd.rpc.remote import REMOTE
from kvtierd.rpc.sockets import SocketError
from kvtierd.rpc.status import AboutDaemon
from kvtierd.rpc.stream import AttachStream, StreamSettings

CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
PING_INTERVAL_MS = 10_000
PING_TIMEOUT_MS = 20_000
"""A connection whose peer answers no ping for this long is closed."""
RPCS_PER_SESSION = 64
RPCS_PER_CONNECTION = 128
"""Calls at once; a client's gRPC library holds back more. It is above what Wait allows one instance."""

Observe = Callable[[str, float], None]
"""Called with the name of every call and the seconds that it took."""


class RpcServer:
    """Serves one cache. Call `bind`, then `start`; `stop` ends every stream."""

    def __init__(
        self,
        cache: Cache,
        connections: Connections,
        limits: CoreLimits,
        settings: ServerConfig,
        connections_max: int,
        leased_blocks_max: int,
        about: AboutDaemon,
        rules: PeerRules,
        observe: Observe,
        stop: Callable[[], None],
        reload: Reload,
    ) -> None:
        """`connections_max`: connections of gRPC at once. `leased_blocks_max` is told to clients; the core
        decides by bytes. `stop` begins the end of the daemon, as an operator's signal would."""
        self._cache = cache
        self._connections = connections
        self._observe = observe
        self._calls = Calls(cache, limits)
        self.draining = Draining(cache, about, self._set_health, stop)
        self._recordings = Recordings(cache, self._calls)
        self._admin = AdminCalls(
            cache, about, Authority(connections, rules), self.draining, self._recordings, reload
        )
        self._bytes_max = settings.message_bytes_max
        self._health_listen = settings.health_listen
        self._hello_deadline_s = settings.hello_deadline_s
        self._health_server: HealthServer | None = None
        self._stream_settings = StreamSettings(
            hello_deadline_s=settings.hello_deadline_s,
            outgoing_max=settings.outgoing_max,
            limits=wire_limits(limits, settings, leased_blocks_max),
            daemon_version=about.version,
            pool_bytes=cache.pool_bytes,
        )
        hard_limit = settings.message_bytes_max * HARD_LIMIT_FACTOR
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", hard_limit),
                ("grpc.max_send_message_length", hard_limit),
                ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
                ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", RPCS_PER_CONNECTION),
                *bounded(connections_max, settings.hello_deadline_s),
            ],
            maximum_concurrent_rpcs=settings.sessions_max * RPCS_PER_SESSION,
        )
        self.health = health.aio.HealthServicer()
        """What health checks say, for every port that answers them."""
        self._add_services()

    def _add_services(self) -> None:
        calls = {body.title(): call for body, (_, call) in self._calls.by_body.items()}
        calls["Wait"] = self._calls.wait
        cache = {name: self._unary(name, call) for name, call in calls.items()}
        cache["Attach"] = self._attach
        self._server.add_generic_rpc_handlers(
            (
                generic_handler(CACHE, cache, self._bytes_max),
                generic_handler(ADMIN, self._admin.by_method, self._bytes_max),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = (CACHE.full_name, ADMIN.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self, path: Path) -> None:
        """Binds the socket file, which must not exist, and the port for health checks if there is one. Raises
        SocketError or ConfigError."""
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise SocketError(f"{path} cannot be bound: {error}") from error
        if self._health_listen != "off":
            self._health_server = HealthServer(self._health_listen, self.health, self._hello_deadline_s)

    async def start(self) -> None:
        await self._server.start()
        await self._set_health(True)
        await self.set_live(True)
        if self._health_server is not None:
            await self._health_server.start()

    async def stop(self, grace_s: float) -> None:
        """Ends the server. Calls that are still running have `grace_s` to end. End the sessions first."""
        await self._recordings.end()
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop()

    async def _set_health(self, serving: bool) -> None:
        for name in ("", CACHE.full_name, ADMIN.full_name, REMOTE.full_name):
            await self.health.set(name, status_of(serving))

    async def set_live(self, live: bool) -> None:
        """Sets what health checks of the service "live" say: whether the daemon should be left running."""
        await self.health.set(LIVE, status_of(live))

    async def _attach(self, _: Any, context: Any) -> None:
        renew = self._cache.handle
        await AttachStream(
            self._connections, self._calls, renew, self._stream_settings, self._observe, context
        ).run()

    def _unary(self, name: str, call: Callable[[Any, Caller], Any]) -> Serve:
        observed = name.lower()

        async def answer(request: Any, _: Any) -> Any:
            connection = self._connections.by_token(request.session.token)
            self._connections.heard(connection)
            await self._connections.pace.wait(connection.peer.tenant)
            started_s, used_s = time.perf_counter(), time.thread_time()
            reply = call(request, connection.caller(request.session.epoch))
            if isinstance(reply, Awaitable):
                return await reply
            took_s, used_s = time.perf_counter() - started_s, time.thread_time() - used_s
            self._connections.pace.spent(connection.peer.tenant, used_s)
            self._observe(observed, took_s)
            return reply

        return answering(answer)


def wire_limits(limits: CoreLimits, settings: ServerConfig, leased_blocks_max: int) -> cache_pb2.Limits:
    """The limits that clients are told in Welcome."""
    return cache_pb2.Limits(
        lookup_hashes_max=limits.lookup_hashes_max,
        transfer_blocks_max=limits.transfer_blocks_max,
        transfers_max=limits.transfers_max,
        leased_blocks_max=leased_blocks_max,
        lease_ttl_ms=round(limits.lease_ttl_s * 1000),
        heartbeat_interval_ms=round(settings.heartbeat_interval_s * 1000),
        gate_deadline_ms=round(limits.gate_deadline_s * 1000),
        message_bytes_max=settings.message_bytes_max,
    )
