"""The name of an engine's instance, and the secret by which its processes know each other."""

import hashlib
import re

SHOWN_CHARACTERS = 8
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def shown_id(engine_id: str) -> str:
    """Returns an engine's id in the form in which everybody may see it.

    vLLM gives each engine a random UUID, which no other process of the host can know. Of that, only the
    beginning is shown. An id that somebody has chosen is shown as it is.
    """
    return _UUID.sub(lambda found: found[0][:SHOWN_CHARACTERS], engine_id)


def secret_of(engine_id: str) -> bytes:
    """Returns what all processes of an engine know, and, if vLLM has chosen the id, nobody else."""
    return hashlib.sha256(b"kvtier-vllm instance 1\0" + engine_id.encode()).digest()
