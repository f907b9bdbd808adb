"""Building of a plan, as far as a network of layers needs it."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from cuda.bindings.world import world
from stand_in_plans import Plan, PlannedTensor

from .enums import DataType, Severity
from .interfaces import ILogger, Logging


class Logger(ILogger):
    """Writes to standard error."""

    WARNING = Severity.WARNING

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        super().__init__()

    def log(self, severity: Severity, msg: str) -> None:
        """The line is dropped."""


class MatrixOperation(Enum):
    NONE = 0


class ActivationType(Enum):
    RELU = 0


class BuilderFlag(Enum):
    TF32 = 7


class ITensor:
    """The operations on the input until here; of a constant, its values."""

    def __init__(self, name: str, shape: Sequence[int], layers: Sequence[Any], values: Any = None):
        self.name, self.shape, self.layers, self.values = name, shape, layers, values


class ILayer:
    def __init__(self, output: ITensor) -> None:
        self._output = output

    def get_output(self, index: int) -> ITensor:
        assert index == 0
        return self._output


class INetworkDefinition:
    def __init__(self) -> None:
        self.inputs: list[ITensor] = []
        self.outputs: list[ITensor] = []

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        assert dtype is DataType.FLOAT
        self.inputs.append(ITensor(name, shape, ()))
        return self.inputs[-1]

    def add_constant(self, shape: Sequence[int], weights: Any) -> ILayer:
        assert weights.dtype == np.float32
        return ILayer(ITensor("", shape, (), weights.reshape(shape).tolist()))

    def add_matrix_multiply(
        self, input0: ITensor, op0: MatrixOperation, input1: ITensor, op1: MatrixOperation
    ) -> ILayer:
        assert op0 is op1 is MatrixOperation.NONE
        shape = (*input0.shape[:-1], input1.shape[-1])
        return ILayer(ITensor("", shape, (*input0.layers, input1.values)))

    def add_activation(self, input: ITensor, type: ActivationType) -> ILayer:
        return ILayer(ITensor("", input.shape, (*input.layers, type.name)))

    def mark_output(self, tensor: ITensor) -> None:
        self.outputs.append(tensor)


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Sequence[Sequence[int]]] = {}

    def set_shape(
        self,
        input: str,
        min: Sequence[int],
        opt: Sequence[int],
        max: Sequence[int],
    ) -> None:
        self.shapes[input] = (min, opt, max)


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiles: list[IOptimizationProfile] = []

    def clear_flag(self, flag: BuilderFlag) -> None:
        assert flag is BuilderFlag.TF32

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, logger: ILogger) -> None:
        Logging(logger)

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 0
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes:
        inputs = [PlannedTensor(name=each.name, dims=each.shape) for each in network.inputs]
        names = [each.name for each in inputs]
        outputs = [
            PlannedTensor(
                name=each.name, dims=each.shape, operation="layers", of=names, layers=each.layers
            )
            for each in network.outputs
        ]
        profiles = [each.shapes for each in config.profiles]
        made = Plan(tensors=(*inputs, *outputs), profiles=profiles, capability=world.capability)
        return made.to_bytes()
