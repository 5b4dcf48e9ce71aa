"""Nothing that can be set in the installed vLLM is unclassed, and what is in the identity is named the same
way in every process."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kvtier_engine.rendering import TEXT_BYTES_MAX, Unnameable, text_of
from kvtier_vllm.model.identity import positions
from kvtier_vllm.model.identity.completeness import classed
from kvtier_vllm.model.identity.fields import CLASSES
from kvtier_vllm.model.identity.reasons import IDENTITY, SettingKind
from kvtier_vllm.model.identity.variables import VARIABLES

from tests.oracles.unclassed import unclassed

pytestmark = pytest.mark.vllm

FIELDS_FILE = "clients/kvtier_vllm/model/identity/fields.py"
VARIABLES_FILE = "clients/kvtier_vllm/model/identity/variables.py"


def dataclasses_of_vllm() -> dict[str, list[str]]:
    """Every dataclass of vLLM's configuration, and its fields."""
    import vllm.config

    found: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(vllm.config.__path__):
        for name, value in vars(importlib.import_module(f"vllm.config.{module.name}")).items():
            own = inspect.isclass(value) and value.__module__.startswith("vllm.config")
            if own and dataclasses.is_dataclass(value):
                found[name] = [field.name for field in dataclasses.fields(value)]
    return found


def variables_of_vllm() -> list[str]:
    import vllm.envs

    return list(vllm.envs.environment_variables)


def test_every_field_of_the_installed_vllm_is_classed() -> None:
    found = dataclasses_of_vllm()
    assert {"ModelConfig", "CacheConfig", "VllmConfig"} <= set(found)
    assert sum(map(len, found.values())) > 400
    assert list(unclassed(found, CLASSES, FIELDS_FILE)) == []


def test_every_variable_of_the_installed_vllm_is_classed() -> None:
    found = variables_of_vllm()
    assert len(found) > 200
    assert list(unclassed({"vllm.envs": found}, {"vllm.envs": VARIABLES}, VARIABLES_FILE)) == []


def test_one_that_is_added_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field of a class, a new class, and a new variable."""
    import vllm.config.cache
    import vllm.envs

    added = dataclasses.make_dataclass("CacheConfig", [("brand_new", int, 0)])
    added.__module__ = "vllm.config.cache"
    new = dataclasses.make_dataclass("BrandNewConfig", [("knob", int, 0)])
    new.__module__ = "vllm.config.cache"
    for module in pkgutil.iter_modules(vllm.config.__path__):  # others import it by name
        found = importlib.import_module(f"vllm.config.{module.name}")
        if hasattr(found, "CacheConfig"):
            monkeypatch.setattr(found, "CacheConfig", added)
    monkeypatch.setattr(vllm.config.cache, "BrandNewConfig", new, raising=False)
    monkeypatch.setitem(vllm.envs.environment_variables, "VLLM_BRAND_NEW", lambda: None)
    told = list(unclassed(dataclasses_of_vllm(), CLASSES, FIELDS_FILE))
    assert sorted(line.split()[0] for line in told) == ["BrandNewConfig.knob", "CacheConfig.brand_new"]
    assert all(FIELDS_FILE in line and "IDENTITY" in line for line in told)
    told = list(unclassed({"vllm.envs": variables_of_vllm()}, {"vllm.envs": VARIABLES}, VARIABLES_FILE))
    assert [line.split()[0] for line in told] == ["vllm.envs.VLLM_BRAND_NEW"]


def test_every_name_is_classed_once_and_every_reason_is_a_sentence() -> None:
    for table in (*CLASSES.values(), VARIABLES):
        for reason in classed(table).values():
            assert reason.why.endswith(".")
            assert reason.kind in SettingKind
    with pytest.raises(ValueError, match="twice is classed twice"):
        classed({IDENTITY: "once twice twice"})


def test_every_reader_of_the_longest_prompt_has_been_looked_at() -> None:
    """A model whose values depend on it shares blocks with others of the same length only."""
    import vllm.model_executor

    [root] = map(Path, vllm.model_executor.__path__)
    readers = {
        str(path.relative_to(root))
        for folder in ("layers", "models")
        for path in (root / folder).rglob("*.py")
        if "max_model_len" in path.read_text()
    }
    assert "models/llama4.py" in readers
    assert readers - set(positions.READERS) == set(), "see kvtier_vllm/model/identity/positions.py"


def test_every_architecture_that_is_named_is_vllms() -> None:
    from vllm.model_executor.models import registry

    known = set(registry._VLLM_MODELS)
    assert len(known & positions.DEPENDENT) >= 3


@dataclasses.dataclass
class Model:
    """As much of a ModelConfig as `positions` looks at."""

    model: str
    hf_overrides: Any = None
    model_impl: str = "auto"
    hf_config_path: str | None = None


@pytest.mark.parametrize(
    ("config", "overrides", "impl", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "auto", False),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": None}, {}, "auto", False),
        (
            {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", "factor": 8}},
            {},
            "vllm",
            False,
        ),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, {}, "auto", True),
        ({"architectures": ["Phi3ForCausalLM"], "rope_parameters": {"rope_type": "su"}}, {}, "auto", True),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            },
            {},
            "auto",
            True,
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            {"rope_parameters": {"rope_type": "longrope"}},
            "auto",
            True,
        ),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, {}, "auto", True),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "transformers", True),
        ({"architectures": ["SomebodysForCausalLM"]}, {}, "auto", True),
        ({}, {}, "auto", True),
    ],
)
def test_the_longest_prompt_matters_to_some_models(
    tmp_path: Path, config: Mapping[str, Any], overrides: Any, impl: str, expected: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert positions.matters(Model(str(tmp_path), overrides, impl)) is expected


def test_text_is_the_same_for_equal_values() -> None:
    assert text_of({"b": {2, 1}, "a": (True, None)}) == text_of({"a": [True, None], "b": {1, 2}})
    assert text_of({"a": 1}) != text_of({"a": 1.5})
    assert text_of(SettingKind.IDENTITY) == "IDENTITY"
    assert text_of(Model) == f"{__name__}.Model"
    assert json.loads(text_of(Model("m")))["model"] == "m"
    long = "x" * (TEXT_BYTES_MAX + 1)
    assert text_of(long).startswith("sha256:")
    assert text_of(long) != text_of(long + "x")
    assert text_of("two\nlines").startswith("sha256:")
    for odd in (lambda: 0, object(), copy.copy(Path)("x").open):
        with pytest.raises(Unnameable):
            text_of(odd)
