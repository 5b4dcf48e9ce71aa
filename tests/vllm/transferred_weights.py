"""A backend of vLLM's weight transfer that needs no trainer: an update multiplies the norms of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "scaled-norms"


@dataclass
class NoTrainer(WeightTransferInitInfo):
    """There is nothing to connect to."""


@dataclass
class Factor(WeightTransferUpdateInfo):
    """What is transferred."""

    factor: float


class ScaledNorms(WeightTransferEngine[Any, Any]):
    """See the module."""

    init_info_cls = NoTrainer
    update_info_cls = Factor

    def init_transfer_engine(self, init_info: NoTrainer) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Factor) -> None:
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                parameter.data.mul_(update_info.factor)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def register() -> None:
    """Makes it known to vLLM, in this process."""
    WeightTransferEngineFactory.register_engine(NAME, ScaledNorms)
