"""Who asks Admin: what callers may see, and whether they may change anything."""

from dataclasses import dataclass
from typing import Any

from kvtierd.core.errors import Reason, Refusal
from kvtierd.logs import logger
from kvtierd.rpc.connections import Connections
from kvtierd.rpc.contract import TOKEN_METADATA
from kvtierd.rpc.peers import PeerRules

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Viewer:
    """Somebody who asks."""

    who: str
    """For the log."""
    tenant: str | None
    """Whose engines and blocks it may see; None: everybody's, an empty text: nobody's."""

    def sees(self, tenant: str) -> bool:
        """Whether it may see what belongs to this tenant."""
        return self.tenant is None or self.tenant == tenant


class Authority:
    """Finds out who asks, by the connection whose token a call carries."""

    def __init__(self, connections: Connections, rules: PeerRules) -> None:
        self._connections = connections
        self._rules = rules

    def viewer(self, context: Any) -> Viewer:
        """Who makes this call. Raises Refusal UNKNOWN_TOKEN."""
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_METADATA:
                peer = self._connections.by_token(value).peer
                return Viewer(str(peer), None if peer.operator else peer.tenant)
        return Viewer("nobody in particular", None if self._rules.only_operators else "")

    def operator(self, context: Any, call: str) -> None:
        """Notes in the log who makes this call. Raises Refusal NOT_OPERATOR if that is no operator, and
        UNKNOWN_TOKEN."""
        viewer = self.viewer(context)
        if viewer.tenant is None:
            log.info("an operator's call", call=call, caller=viewer.who)
            return
        log.warning("an operator's call was refused", call=call, caller=viewer.who)
        raise Refusal(
            Reason.NOT_OPERATOR,
            f"{call} is for operators, and the caller is {viewer.who}: call as the daemon's user "
            "(sudo -u kvtier kvtierctl …), or have server.operators name yours",
        )
