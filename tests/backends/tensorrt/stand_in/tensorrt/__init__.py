"""A stand-in for `tensorrt`: the part of its runtime that the backend uses, on memory of the host.

Signatures are those of TensorRT 10.14; `test_contract.py` compares them where it is installed.
"""

from pathlib import Path
from typing import Any

from cuda.bindings.world import Refused, world
from stand_in_plans import VERSION, Plan, read

from .builder import (
    ActivationType,
    Builder,
    BuilderFlag,
    IBuilderConfig,
    INetworkDefinition,
    IOptimizationProfile,
    Logger,
    MatrixOperation,
)
from .engine import ICudaEngine, IExecutionContext
from .enums import (
    DataType,
    ExecutionContextAllocationStrategy,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
)
from .interfaces import ILogger, IOutputAllocator, Logging

__version__ = VERSION
__all__ = [
    "ActivationType",
    "Builder",
    "BuilderFlag",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IOutputAllocator",
    "IPluginRegistry",
    "Logger",
    "MatrixOperation",
    "Runtime",
    "TensorFormat",
    "TensorIOMode",
    "TensorLocation",
    "get_plugin_registry",
    "init_libnvinfer_plugins",
]


class IPluginRegistry:
    """Libraries give it plugins of their own names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def load_library(self, plugin_path: str) -> object:
        self.names.add(Path(plugin_path).stem)
        return object()


_registry = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _registry


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    Logging(logger)
    world.calls["init_libnvinfer_plugins"] += 1
    return namespace == ""


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._log = Logging(logger)
        if world.refusals.pop("Runtime", None):
            self._log.error("CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.engine_host_code_allowed = False
        self.DLA_core = -1
        self.num_DLA_cores = world.dla_cores

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        world.calls["deserialize_cuda_engine"] += 1
        plan = read(serialized_engine)
        if plan is None or (reason := self._refusal(plan)):
            self._log.error(reason if plan else "[runtime.cpp::parsePlan::314] Error Code 4: Magic")
            return None
        world.calls[f"DLA {self.DLA_core}"] += 1
        try:
            return ICudaEngine(plan, self._log)
        except Refused:
            self._log.error(
                "[defaultAllocator.cpp::allocate::19] Error Code 1: Cuda Runtime (out of memory)"
            )
            return None

    def _refusal(self, plan: Plan) -> str:
        if plan.version != VERSION and not plan.version_compatible:
            return (
                "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan "
                "file is not compatible with this version of TensorRT, expecting library version "
                f"{VERSION} got {plan.version}, please rebuild.)"
            )
        if plan.version_compatible and not self.engine_host_code_allowed:
            return "Cannot deserialize engine with lean runtime: engine host code is not allowed"
        if plan.for_dla and self.DLA_core < 0:
            return "IRuntime::deserializeCudaEngine: Error Code 4: DLA core is not set"
        if plan.capability != world.capability:
            return (
                "The engine plan file is generated on an incompatible device, expecting compute "
                f"{world.capability} got compute {plan.capability}, please rebuild."
            )
        for name in plan.plugins:
            if name not in _registry.names:
                return (
                    "[/home/builder/trt/plugin.cpp::getCreator::5] IPluginRegistry::getCreator: "
                    f"Error Code 4: API Usage Error (Cannot find plugin: {name}, version: 1)"
                )
        return ""
