"""The backend `tensorrt`: plans of TensorRT on NVIDIA GPUs."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from backends.tensorrt.checks import check, complete, is_complete
from backends.tensorrt.cuda import CudaRuntime, GpuStream
from backends.tensorrt.engines import Engine, Engines
from backends.tensorrt.graphs import captures
from backends.tensorrt.instance import TensorRtInstance
from backends.tensorrt.library import Library, load_failure
from backends.tensorrt.parameters import (
    allocation,
    cuda_hints,
    dla_core,
    profile_indices,
    require_gpu,
    urgency,
)
from backends.tensorrt.plan import PlanOnGpu, PlanOptions
from gateway.backend import Backend, Description, Instance, ModelContext
from gateway.config import InstanceGroup, ModelConfig
from gateway.tensor_runtime.completion import with_batching
from gateway.threads import apart


class TensorRtBackend(Backend):
    """The instances of a model on one GPU share its weights.

    ImportError names a missing part of TensorRT or of CUDA's bindings.
    """

    def __init__(self) -> None:
        self._library = Library.find()
        self._cuda = CudaRuntime(self._library.cuda)
        self._engines = Engines(self._library)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        groups = config.instance_group or (InstanceGroup(name=config.name),)
        require_gpu(config, groups[0])
        return self._completed(config, path, groups)

    def describe(self, config: ModelConfig, path: Path) -> Description:
        """The config in the plan, read on any GPU of this machine."""
        groups = config.instance_group or (InstanceGroup(name=config.name),)
        return Description(self._completed(config, path, groups))

    def _completed(
        self, config: ModelConfig, path: Path, groups: Sequence[InstanceGroup]
    ) -> ModelConfig:
        if is_complete(config):
            return with_batching(config)
        engine = self._open(config, path, next(iter(groups[0].gpus), 0), groups[0])
        count = len(engine.signature.profiles)
        named = {index for group in groups for index in profile_indices(group, config.name, count)}
        return complete(config, engine.signature, sorted(named))

    async def load(self, context: ModelContext) -> Instance:
        require_gpu(context.config, context.group)
        return await apart(
            self._load, context, asyncio.get_running_loop(), discard=TensorRtInstance.discard
        )

    def _open(self, config: ModelConfig, path: Path, device: int, group: InstanceGroup) -> Engine:
        self._engines.settings = self.settings
        return self._engines.open(config, path, device, dla_core(group, config.name))

    def _load(self, context: ModelContext, loop: asyncio.AbstractEventLoop) -> TensorRtInstance:
        config, name = context.config, context.name or context.config.name
        engine = self._open(config, context.path, context.device, context.group)
        signature = engine.signature
        indices = profile_indices(context.group, config.name, len(signature.profiles))
        check(config, signature, indices)
        options = _options(config, name, engine, indices)
        return self._place(context, engine, options, loop)

    def _place(
        self,
        context: ModelContext,
        engine: Engine,
        options: PlanOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> TensorRtInstance:
        """The instance; after a failure everything is freed."""
        self._library.log.forget()
        with load_failure(engine.subject), ExitStack() as opened:
            gpu = GpuStream(self._cuda, context.device, options.urgency, spins=options.spins)
            opened.callback(gpu.close)
            plan = PlanOnGpu(engine, gpu, self._library.log, options)
            opened.callback(plan.close)
            # Starts a thread: must be last.
            instance = TensorRtInstance(context, engine, gpu, plan, loop)
            opened.pop_all()
            return instance


def _options(config: ModelConfig, name: str, engine: Engine, indices: Sequence[int]) -> PlanOptions:
    profiles = engine.signature.profiles
    return PlanOptions(
        name=name,
        captures={index: captures(config, profiles[index]) for index in indices},
        allocation=allocation(config, name),
        urgency=urgency(config),
        spins=cuda_hints(config).busy_wait_events,
    )
