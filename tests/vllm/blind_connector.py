"""The connector without the checks that keep engines with different blocks apart, so that only audits can
find it."""

from __future__ import annotations

import os
from typing import Any

from kvtier_vllm.connector import KvtierConnector
from kvtier_vllm.model.identity import positions

BLIND_TO = "KVTIER_TEST_BLIND_TO"


class BlindConnector(KvtierConnector):
    """`KVTIER_TEST_BLIND_TO` names what it does not see: "positions"."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if os.environ.get(BLIND_TO) == "positions":
            positions.matters = lambda model_config: False
        super().__init__(vllm_config, role, kv_cache_config)
