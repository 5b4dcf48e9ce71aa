"""Takes out of an engine's configuration what is in the identity of its blocks, and what else to tell."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier_engine.rendering import Unnameable, digest_of, text_of

from kvtier_vllm.model.identity.completeness import classed
from kvtier_vllm.model.identity.fields import CLASSES
from kvtier_vllm.model.identity.reasons import DRAFT, IDENTITY, OWN_CODE, ROUNDING, Classification
from kvtier_vllm.model.identity.variables import VARIABLES

DEPTH_MAX = 8
TOLD_BYTES_MAX = 200
"""The longest text of a value that is only shown to people."""
SAME_VALUES = {"load_config.load_format": ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer")}
"""Values that mean the same as the default."""
SECRET = ("load_config.model_loader_extra_config", "additional_config")
"""Settings that may hold access keys, or anything: people see a digest of them."""
NOT_BELOW = ("draft_model_config", "target_model_config", "draft_parallel_config", "target_parallel_config")
"""Configurations of other engines and models, which are named in another way."""


class UnnameableSetting(Exception):
    """A setting that may change a block's bytes has a value that cannot be named. The message says which."""


def identity_of(
    vllm_config: Any, *, drafts: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the settings that may change a block's bytes and differ from the defaults, by their paths. With
    `drafts`, a draft model's KV lies in the blocks too. Raises UnnameableSetting."""
    reasons = (IDENTITY, DRAFT) if drafts else (IDENTITY,)
    found = {}
    for path, value in _settings(vllm_config, reasons):
        if value in SAME_VALUES.get(path, ()):
            continue
        try:
            found[path] = digest_of(value) if path in SECRET else text_of(value)
        except Unnameable as error:
            raise UnnameableSetting(f"{path} is {error}, which cannot be named") from error
    return found | _variables(environment, reasons)


def configuration_of(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings that only reorder sums, or run the user's own code, and differ from the defaults:
    what engines that share may differ in, for people."""
    reasons = (ROUNDING, OWN_CODE)
    found = {}
    for path, value in _settings(vllm_config, reasons):
        try:
            text = text_of(value)
        except Unnameable:
            continue
        if len(text) <= TOLD_BYTES_MAX:
            found[path] = text
    return found | _variables(environment, reasons)


def _settings(config: Any, reasons: tuple[Classification, ...]) -> Iterator[tuple[str, Any]]:
    yield from _below("", config, reasons, 0)


def _below(
    at: str, config: Any, reasons: tuple[Classification, ...], depth: int
) -> Iterator[tuple[str, Any]]:
    table = classed(CLASSES.get(type(config).__name__, {}))
    for field in dataclasses.fields(config):
        if not hasattr(config, field.name):
            continue
        value = getattr(config, field.name)
        path = f"{at}{field.name}"
        if table.get(field.name) in reasons:
            if not _is_default(field, value):
                yield path, value
        elif field.name not in NOT_BELOW and depth < DEPTH_MAX and type(value).__name__ in CLASSES:
            yield from _below(f"{path}.", value, reasons, depth + 1)


def _is_default(field: Any, value: Any) -> bool:
    default, factory = field.default, field.default_factory
    if hasattr(default, "default_factory"):  # pydantic's Field()
        default, factory = default.default, default.default_factory or dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        default = factory()
    try:
        return bool(value == default)
    except Exception:  # of arrays, for example
        return False


def _variables(environment: Mapping[str, str], reasons: tuple[Classification, ...]) -> dict[str, str]:
    return {
        f"environment.{name}": text_of(environment[name])
        for reason in reasons
        for name in VARIABLES.get(reason, "").split()
        if environment.get(name)
    }
