"""What routers and schedulers on other hosts may ask, over TCP with mutual TLS: where blocks are, and how the
daemon is. It only reads, tells each caller of its own tenant only, and takes little of the event loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2_grpc
from kvtier.v1 import admin_pb2, remote_pb2

from kvtierd.cache import Cache
from kvtierd.config.certificates import CertificateError
from kvtierd.config.descriptors import REMOTE_CONNECTIONS
from kvtierd.config.people import ANONYMOUS, CERTIFICATE, TenantRule, tenant_of_remote
from kvtierd.config.remote import RemoteConfig
from kvtierd.config.settings import ConfigError
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX
from kvtierd.core.maintenance.finding import NOWHERE, ON_HOST
from kvtierd.logs import logger
from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.certificates import RotatingCertificates, names_in
from kvtierd.rpc.handlers import Serve, answering, generic_handler
from kvtierd.rpc.health import bounded
from kvtierd.rpc.pace import LoopPace
from kvtierd.rpc.queries import hashes_of
from kvtierd.rpc.status import AboutDaemon, namespaces_response, status_response

REMOTE = remote_pb2.DESCRIPTOR.services_by_name["Remote"]
PART = 0.1
"""The part of the event loop that all remote callers share."""
CALLS_PER_TENANT = 16
CALLS_PER_CONNECTION = 8
FIND_HASHES_MAX = 8_192
"""Hashes in one Find. What all connections may have sent is held in memory, so it is less than engines may
look up."""
HASHES_AT_ONCE = 1_024
"""Hashes of one Find between which engines are served."""
BESIDES_HASHES_BYTES = 1_024
"""Room in a message for what is not hashes."""
HARD_LIMIT_FACTOR = 2
"""Messages larger than this many times the limit are refused by gRPC itself."""
SILENCE_S = 60.0
"""A connection on which nothing has been called for so long is closed."""
HANDSHAKE_S = 10.0
CONNECTION_AGE_S = 600.0
"""A connection is replaced after about so long, so that a client whose certificate has run out, or whose
authority is not trusted any more, does not stay."""
CONNECTION_GRACE_S = 30.0
NAMES_SHOWN = 4
"""How many names of a certificate a refusal repeats, and how many characters of each."""
NAME_CHARACTERS_SHOWN = 256

log = logger(__name__)

_Call = Callable[[Any, Viewer], Awaitable[Any]]


class RemoteCalls:
    """The calls of kvtier.v1.Remote. All of them raise Refusal."""

    def __init__(
        self,
        cache: Cache,
        about: AboutDaemon,
        rules: Sequence[TenantRule],
        hashes_max: int,
        *,
        insecure: bool,
    ) -> None:
        """`hashes_max`: hashes that an engine may look up in one call. `insecure`: nobody has a
        certificate."""
        self._cache = cache
        self._about = replace(about, pid=0, socket="", metrics_url="", command="")
        self._rules = rules
        self._hashes_max = min(FIND_HASHES_MAX, hashes_max)
        self._insecure = insecure
        # Also where there is one only.
        self._pace = LoopPace(lambda: 2, part=PART, light_max=PART)
        self._running: Counter[str] = Counter()
        self.by_method: dict[str, Serve] = {
            "Find": self._bounded(self.find),
            "Status": self._bounded(self.status),
            "ListNamespaces": self._bounded(self.namespaces),
        }

    def viewer(self, context: Any) -> Viewer:
        """Who makes this call. Raises Refusal FOREIGN if no rule admits it."""
        names = None if self._insecure else names_in(context.auth_context())
        tenant = tenant_of_remote(self._rules, names)
        if tenant is not None:
            return Viewer(context.peer(), tenant)
        if names is None:
            who, rule = "callers without a certificate", f"{ANONYMOUS}=TENANT"
        elif not names:
            who, rule = "the caller's certificate, which carries no name,", f"{CERTIFICATE}:NAME=TENANT"
        else:
            shown = [name[:NAME_CHARACTERS_SHOWN] for name in names[:NAMES_SHOWN]]
            who = f"the caller's certificate, which carries {' and '.join(map(repr, shown))},"
            rule = f"{CERTIFICATE}:{shown[0]}=TENANT"
        raise Refusal(
            Reason.FOREIGN,
            f"there is no rule for {who} on this daemon: its operator has to add {rule} to server.tenants "
            "and restart it",
        )

    def _bounded(self, call: _Call) -> Serve:
        """A call of which a tenant makes a few at once."""

        async def serve(request: Any, context: Any) -> Any:
            viewer = self.viewer(context)
            tenant = viewer.tenant or ""
            if self._running[tenant] >= CALLS_PER_TENANT:
                message = f"at most {CALLS_PER_TENANT} calls at once of one tenant: wait for some"
                raise Refusal(Reason.QUEUE_FULL, message)
            self._running[tenant] += 1
            try:
                return await call(request, viewer)
            finally:
                self._running[tenant] -= 1

        return answering(serve)

    async def _at_once(self, viewer: Viewer, work: Callable[[], Any]) -> Any:
        """Does a piece of work on the loop when it is the tenant's turn, and notes how long it took."""
        tenant = viewer.tenant or ""
        await self._pace.wait(tenant)
        started_s = time.thread_time()
        try:
            return work()
        finally:
            self._pace.spent(tenant, time.thread_time() - started_s)

    async def find(self, request: remote_pb2.FindRequest, viewer: Viewer) -> remote_pb2.FindResponse:
        tenant, digest = viewer.tenant or "", request.namespace_digest.lower()
        space, about = await self._at_once(
            viewer, lambda: self._cache.space_of(digest, request.group, tenant)
        )
        hashes = hashes_of(request.hashes, about.hash_bytes, "hashes", self._hashes_max)
        found = [np.zeros(0, np.uint8)]
        for first in range(0, len(hashes), HASHES_AT_ONCE):
            some = hashes[first : first + HASHES_AT_ONCE]
            found.append(await self._at_once(viewer, partial(self._cache.find, space, some)))
            await asyncio.sleep(0)
        places = np.concatenate(found)
        return remote_pb2.FindResponse(
            leading_blocks=_leading(places != NOWHERE),
            leading_host_blocks=_leading(places == ON_HOST),
            places=places.tobytes(),
        )

    async def status(self, request: admin_pb2.StatusRequest, viewer: Viewer) -> admin_pb2.StatusResponse:
        snapshot = await self._at_once(viewer, self._cache.snapshot)
        return await status_response(self._about, snapshot, viewer)

    async def namespaces(
        self, request: admin_pb2.ListNamespacesRequest, viewer: Viewer
    ) -> admin_pb2.ListNamespacesResponse:
        found = await self._at_once(
            viewer, lambda: self._cache.namespaces(request.namespace.lower(), viewer.tenant)
        )
        return await namespaces_response(found)


def _leading(there: "np.typing.NDArray[np.bool_]") -> int:
    return len(there) if there.all() else int(np.argmin(there))


class RemoteServer:
    """Serves `RemoteCalls` and health checks over TCP."""

    def __init__(
        self, settings: RemoteConfig, calls: RemoteCalls, servicer: health.aio.HealthServicer
    ) -> None:
        """Binds the port at once; port 0 picks a free one. Raises ConfigError if it cannot, or if a file
        cannot be used."""
        bytes_max = FIND_HASHES_MAX * HASH_BYTES_MAX + BESIDES_HASHES_BYTES
        age_ms, grace_ms = round(CONNECTION_AGE_S * 1_000), round(CONNECTION_GRACE_S * 1_000)
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", bytes_max * HARD_LIMIT_FACTOR),
                ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
                ("grpc.max_connection_age_ms", age_ms),
                ("grpc.max_connection_age_grace_ms", grace_ms),
                *bounded(REMOTE_CONNECTIONS, SILENCE_S),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1_000)),
            ],
            maximum_concurrent_rpcs=REMOTE_CONNECTIONS * CALLS_PER_CONNECTION,
        )
        self._server.add_generic_rpc_handlers((generic_handler(REMOTE, calls.by_method, bytes_max),))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        try:
            if settings.files is None:
                self.port = self._server.add_insecure_port(settings.listen)
                log.warning(
                    "the remote port has no TLS: whoever reaches it reads what the rule for anonymous shows",
                    listen=settings.listen,
                    remedy="set remote.certificate, remote.key and remote.client_ca instead of "
                    "remote.insecure",
                )
            else:
                self._certificates = RotatingCertificates(settings.files)
                credentials = self._certificates.credentials()
                self.port = self._server.add_secure_port(settings.listen, credentials)
        except CertificateError as error:
            raise ConfigError(error.field, str(error.path), str(error)) from None
        except RuntimeError as error:
            message = f"cannot be bound ({error}): choose another port, or off"
            raise ConfigError("remote.listen", settings.listen, message) from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
