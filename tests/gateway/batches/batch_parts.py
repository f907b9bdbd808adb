"""Configs and requests of batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gateway.batches.stacking import Stacking
from gateway.config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
)
from gateway.config.data_type import DataType
from gateway.messages import InferRequest, RequestedOutput
from gateway.tensor import Datatype, Tensor, array_tensor

NUMERIC = [each for each in Datatype if each is not Datatype.BYTES]


def one_to_one(
    datatype: Datatype = Datatype.FP32, dims: tuple[int, ...] = (-1,), **fields: Any
) -> ModelConfig:
    """A batching model with input X and output Y."""
    kind = DataType.of(datatype)
    return ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="X", data_type=kind, dims=dims),),
        output=(ModelOutput(name="Y", data_type=kind, dims=dims),),
        **fields,
    )


def request(*inputs: Tensor, outputs: Sequence[str] = ()) -> InferRequest:
    return InferRequest(
        model="m", inputs=inputs, outputs=tuple(RequestedOutput(name) for name in outputs)
    )


def floats(values: Any, name: str = "X") -> Tensor:
    return array_tensor(name, Datatype.FP32, np.asarray(values, dtype=np.float32))


def echo(stacking: Stacking, requests: Sequence[InferRequest]) -> list[tuple[Tensor, ...]]:
    """The response of a model whose output Y is its input X."""
    gathered = stacking.gather(requests)["X"]
    return list(stacking.scatter({"Y": replace(gathered, name="Y")}, requests))


def only(answers: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [tensor for (tensor,) in answers]
