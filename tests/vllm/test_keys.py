"""What else than tokens decides whether KV may be shared is in vLLM's block hashes, and so in ours: two
requests that differ in their salt or image never share a block, two that do not, do. Adapters: see
test_adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from kvtier.v1 import admin_pb2
from kvtier_vllm.hashes import tokens_of

from tests.support.daemon import DaemonHost
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.mini_rig import all_came_back, compute
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

LENGTH, WHOLE = 6 * TOKENS + 5, 6 * TOKENS
IMAGE_AT = 2 * TOKENS + 3
"""The first image begins in the third block, so that two are shared whatever it shows."""


def images(*shown: str, at: int = IMAGE_AT, length: int = TOKENS) -> dict[str, Any]:
    """Images of one size, one after the other."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    positions = [PlaceholderRange(offset=at + index * length, length=length) for index in range(len(shown))]
    features = [
        MultiModalFeatureSpec(None, "image", name, position)
        for name, position in zip(shown, positions, strict=True)
    ]
    return {"mm_features": features}


def see_images(engine: MiniEngine) -> None:
    """The tests' model is a Llama, for which vLLM's scheduler has no room for images; now it has."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=10_000)
    engine.scheduler.max_num_encoder_input_tokens = 10_000


class Shared:
    """What requests find of each other in kvtierd, in an engine that forgets everything itself."""

    def __init__(self, engine: MiniEngine) -> None:
        self._engine = engine
        self._count = 0

    def found(self, **request: Any) -> int:
        """Tokens that a request is spared."""
        self._engine.forget()
        self._count += 1
        return compute(self._engine, f"r{self._count}", prompt(LENGTH), **request)


@pytest.fixture
def shared(make: Callable[..., MiniEngine]) -> Shared:
    engine = make()
    see_images(engine)
    return Shared(engine)


def test_only_requests_of_one_salt_share(shared: Shared) -> None:
    for salt in (None, "tenant a", "tenant b"):
        assert shared.found(cache_salt=salt) == 0
    for salt in (None, "tenant a", "tenant b"):
        assert shared.found(cache_salt=salt) == WHOLE
    all_came_back(shared._engine)


def test_requests_share_up_to_the_first_image_that_differs(shared: Shared) -> None:
    before_image = IMAGE_AT // TOKENS * TOKENS
    second_image = (IMAGE_AT + TOKENS) // TOKENS * TOKENS
    assert shared.found(**images("cat", "dog")) == 0
    assert shared.found(**images("cat", "dog")) == WHOLE
    assert shared.found(**images("cat", "cow")) == second_image
    assert shared.found(**images("cow", "dog")) == before_image
    assert shared.found() == before_image, "the same tokens, and no image"
    assert shared.found(**images("cat", "dog", at=IMAGE_AT - 1)) == before_image, "the same images elsewhere"
    all_came_back(shared._engine)


def test_engines_of_two_tenants_never_share(make: Callable[..., MiniEngine]) -> None:
    for tenant in ("a", "b"):
        assert compute(make(salt="one", tenant=tenant), "first", prompt(LENGTH)) == 0
    assert compute(make(salt="one", tenant="a"), "again", prompt(LENGTH)) == WHOLE


def test_the_token_ids_of_a_prompt_are_explained(make: Callable[..., MiniEngine], host: DaemonHost) -> None:
    """As an operator asks: hashes by one command, what became of them by the other."""
    engine = make()
    tokens = prompt(LENGTH, seed=77)
    compute(engine, "stored", tokens, cache_salt="s")
    longer = [*tokens, *range(TOKENS)]
    hashing = [sys.executable, "-m", "kvtier_vllm.hashes", "-", f"--block-tokens={TOKENS}", "--cache-salt=s"]
    hashes = subprocess.run(
        hashing, input=json.dumps(longer), capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert len(hashes.split()) == len(longer) // TOKENS
    explaining = [sys.executable, "-m", "kvtierd.ctl", "explain", "-", f"--socket={host.socket}", "--json"]
    said = subprocess.run(
        explaining, input=hashes, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    verdicts = [answer["explanations"][0]["verdict"] for answer in json.loads(said)]
    readable = WHOLE // TOKENS
    assert verdicts[:readable] == [admin_pb2.VERDICT_READABLE] * readable
    assert admin_pb2.VERDICT_READABLE not in verdicts[readable + 1 :]


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", "[1, 2, 3]", " [1,2,\n3] "])
def test_token_ids_are_read_as_people_write_them(text: str) -> None:
    assert tokens_of(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["1 x", "[1, true]", "[1.5]", '{"a": 1}', "[-1]"])
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"token ids|invalid literal"):
        tokens_of(text)
