"""A prefill/decode connector for tests, to run beside ours in vLLM's MultiConnector: it "receives" a prompt's
KV from nobody, by writing what the model of tests/vllm/mini_engine.py would have computed, and "sends"
finished requests, which delays the release of their blocks.

A request says in `kv_transfer_params` what it wants: `{"peer": {"tokens": 64, "asynchronous": True}}`;
"fails": the first block that is received holds something else, and is reported; "sends": its blocks are kept
for three steps after its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from tests.vllm.mini_engine import TOKENS, _digests

SEND_STEPS = 3


@dataclass
class Receive:
    """One request's."""

    request: str
    tokens: list[int]
    first_block: int
    block_ids: list[int]
    asynchronous: bool
    fails: bool


@dataclass
class PeerMetadata(KVConnectorMetadata):
    """One step."""

    receives: list[Receive] = field(default_factory=list)
    sends: list[str] = field(default_factory=list)


def _wish(request: Any) -> dict[str, Any]:
    wish: dict[str, Any] = (request.kv_transfer_params or {}).get("peer", {})
    return wish


class PeerConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles; see the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._out = PeerMetadata()
        self._asked: dict[str, int] = {}
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._sending: dict[str, int] = {}
        self._pages: list[Any] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wish = _wish(request)
        if request.request_id in self._received:
            return 0, False
        self._asked[request.request_id] = num_computed_tokens
        tokens = max(0, wish.get("tokens", 0) - num_computed_tokens)
        return tokens, bool(tokens) and wish.get("asynchronous", False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        self._received.add(request.request_id)
        first = self._asked[request.request_id] // TOKENS
        [table] = blocks.get_block_ids()
        end = first + num_external_tokens // TOKENS
        wish, tokens = _wish(request), list(request.all_token_ids)
        self._out.receives.append(
            Receive(
                request.request_id,
                tokens,
                first,
                table[first:end],
                wish.get("asynchronous", False),
                wish.get("fails", False),
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> PeerMetadata:
        out, self._out = self._out, PeerMetadata()
        return out

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        # As those of vLLM's do, only what has run to its end: what is aborted while it loads (here or
        # elsewhere) may not be sent as well, or vLLM ends.
        sends = _wish(request).get("sends", False) and request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        if sends:
            self._out.sends.append(request.request_id)
        return sends, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        import torch

        self._pages = [tensor.view(torch.int8).numpy().view(np.uint64) for tensor in kv_caches.values()]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for receive in connector_metadata.receives:
            digests = _digests(receive.tokens)
            for index, block in enumerate(receive.block_ids, receive.first_block):
                own = digests[index * TOKENS : (index + 1) * TOKENS]
                for layer, pages in enumerate(self._pages):
                    pages[block] = (own + np.uint64(layer))[None, :, None]
            if receive.fails:
                for pages in self._pages:
                    pages[receive.block_ids[0]] = 7
                self._bad.add(receive.block_ids[0])
        self._sending |= dict.fromkeys(connector_metadata.sends, SEND_STEPS)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Done when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Likewise."""

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        """Nobody receives anything."""

    def wait_for_save(self) -> None:
        """Likewise."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PeerMetadata)
        received = {receive.request for receive in meta.receives if receive.asynchronous}
        self._sending = {name: steps - 1 for name, steps in self._sending.items()}
        sent = {name for name, steps in self._sending.items() if steps <= 0}
        for name in sent:
            del self._sending[name]
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad
