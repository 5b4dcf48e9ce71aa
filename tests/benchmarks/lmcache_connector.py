"""vLLM's connector to LMCache's server, in a vLLM without Triton; for `kv_connector_module_path`.

Such a vLLM (0.32) looks for kernels in the `__dict__` of everything that any module holds. LMCache loads
llvmlite, whose library takes each unknown attribute for a function's name: the engine would not start.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]

_llvm: Any = importlib.import_module("llvmlite.binding.ffi").lib
# It finds here what it has looked up before: an empty `__dict__`, instead of a function that does not exist.
_llvm._fntab["__dict__"] = {}
