"""Which variables of the environment separate engines of SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kvtier_engine.rendering import Unnameable
from kvtier_sglang.environment import variables_of


class Field:
    """As SGLang's EnvField."""

    def __init__(self, default: Any, kind: Any = str, *, secret: bool = False) -> None:
        self.default, self.parse, self.secret = default, kind, secret

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        raise RuntimeError("SGLang's fields say so")

    def get(self) -> Any:
        text = os.environ.get(self.name)
        return self.default if text is None else self.parse(text)


class Registry:
    """As SGLang's `envs`."""

    SGLANG_USE_HND_KVCACHE = Field(False, lambda text: text in ("1", "true"))
    SGLANG_MAMBA_SSM_DTYPE = Field(None)
    SGLANG_LOG_MS = Field(False, bool)
    SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU = Field(lambda: True, lambda text: text == "1")
    USE_TRITON_W8A8_FP8_KERNEL = Field(False, bool)
    SGLANG_KEY = Field("", secret=True)
    SGLANG_BROKEN = Field(None, lambda text: object())


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "SGL_", "AITER_")):
            monkeypatch.delenv(name)


def found(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    with monkeypatch.context() as scope:
        for name, value in variables.items():
            scope.setenv(name, value)
        return variables_of(Registry())


def test_what_is_set_to_its_default_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables_of(Registry()) == {}
    assert found(monkeypatch, SGLANG_USE_HND_KVCACHE="0", SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU="1") == {}


def test_what_may_change_bytes_is_named_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1", "true"):
        assert found(monkeypatch, SGLANG_USE_HND_KVCACHE=text) == {"env.SGLANG_USE_HND_KVCACHE": "true"}
    named = found(
        monkeypatch,
        SGLANG_MAMBA_SSM_DTYPE="bfloat16",
        SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU="0",  # has LOG in it, and rounds otherwise
        USE_TRITON_W8A8_FP8_KERNEL="1",
        SGLANG_OF_A_LATER_RELEASE="x",
        AITER_SOMETHING="y",
    )
    assert named == {
        "env.AITER_SOMETHING": "y",
        "env.SGLANG_MAMBA_SSM_DTYPE": "bfloat16",
        "env.SGLANG_OF_A_LATER_RELEASE": "x",
        "env.SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU": "false",
        "env.USE_TRITON_W8A8_FP8_KERNEL": "true",
    }


def test_what_differs_between_runs_and_hosts_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = dict.fromkeys(
        (
            "SGLANG_RUN_ID",
            "SGLANG_LOG_MS",
            "SGLANG_HOST_IP",
            "SGLANG_CACHE_DIR",
            "SGLANG_PORT",
            "SGLANG_USE_CPU_ENGINE",
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
            "SGL_LOG_LEVEL",
            "MOONCAKE_MASTER",
            "EXA_API_KEY",
        ),
        "7",
    )
    assert found(monkeypatch, **harmless) == {}


def test_a_file_counts_by_its_content_and_a_secret_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "quantisation.json"
    file.write_text("{}")
    one = found(monkeypatch, SGLANG_MAMBA_SSM_DTYPE=str(file))
    file.write_text("[]")
    assert found(monkeypatch, SGLANG_MAMBA_SSM_DTYPE=str(file)) != one
    [secret] = found(monkeypatch, SGLANG_KEY="hunter2").values()
    assert secret.startswith("sha256:")
    assert "hunter2" not in secret


def test_what_cannot_be_named_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unnameable, match=r"the variable SGLANG_BROKEN is a builtins\.object"):
        found(monkeypatch, SGLANG_BROKEN="1")
