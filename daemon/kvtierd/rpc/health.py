"""Health checks over TCP for those who cannot reach the Unix socket, such as kubelets and load balancers.

Only grpc.health.v1 is served there; nobody can use the cache or learn anything about it.
"""

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtierd.config.settings import ConfigError

LIVE = "live"
"""The service whose status says whether the daemon should be left running, also while it drains."""
CALLS_MAX = 64
"""Calls at once."""
CONNECTIONS_MAX = 64


def bounded(connections_max: int, silence_s: float) -> list[tuple[str, int]]:
    """Options of a gRPC server that bound what its connections take: beyond `connections_max` they are closed
    at once, and so is one on which nothing has been called for `silence_s`. Its client makes another one when
    it calls again."""
    silence_ms = min(round(silence_s * 1_000), 2**31 - 1)
    return [
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", silence_ms),
        ("grpc.max_connection_idle_ms", silence_ms),
    ]


class HealthServer:
    """Answers on `listen` with what `servicer` says."""

    def __init__(self, listen: str, servicer: health.aio.HealthServicer, silence_s: float) -> None:
        """Binds `host:port` at once; port 0 picks a free one. Raises ConfigError if it cannot."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 4096),
                *bounded(CONNECTIONS_MAX, silence_s),
            ],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        try:
            self.port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigError(
                "server.health_listen", listen, f"cannot be bound ({error}): choose another port, or off"
            ) from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


def status_of(well: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    known = health_pb2.HealthCheckResponse
    return known.SERVING if well else known.NOT_SERVING
