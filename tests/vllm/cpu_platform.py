"""vLLM 0.33 exists only as a CUDA build: on a machine without a GPU it finds no platform, and its scheduler
cannot be made. For tests that compute nothing, this makes it run as if it were the CPU's build."""

from __future__ import annotations


def ensure() -> None:
    """Before anything else of vLLM's is imported. Does nothing where vLLM is not installed, or knows its
    platform."""
    try:
        from vllm import platforms
    except ImportError:
        return
    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
