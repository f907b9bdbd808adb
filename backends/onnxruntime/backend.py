"""The backend `onnxruntime`: ONNX models by ONNX Runtime, on the CPU or on a GPU."""

import threading
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

from backends.onnxruntime.instance import OnnxRuntimeInstance
from backends.onnxruntime.library import onnxruntime
from backends.onnxruntime.model_file import DEFAULT_FILE, is_steady, signature
from backends.onnxruntime.parameters import CorePin, CorePins, SessionThreads, SharedThreads
from backends.onnxruntime.providers import CUDA, providers
from backends.onnxruntime.session import SessionPlan, open_session
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.checks import check
from gateway.tensor_runtime.completion import (
    DEFAULT_BATCH_SIZE,
    USUAL_BATCH_SIZE,
    complete,
    is_complete,
)
from gateway.tensor_runtime.model_files import find_file
from gateway.tensor_runtime.parameters import count
from gateway.threads import apart


class OnnxRuntimeBackend(Backend):
    """Each instance has a session of its own, as on Triton."""

    keeps_to_cores = True

    @property
    def computes_on_gpus(self) -> bool:
        return CUDA in onnxruntime.get_available_providers()

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if is_complete(config):
            return config
        group = next(iter(config.instance_group), InstanceGroup())
        wanted = providers(config, group.kind, next(iter(group.gpus), 0))
        plan = SessionPlan(config.name, SessionThreads(1, 1), wanted, optimized=False)
        session = open_session(config, path, plan)
        size = count(self.settings, DEFAULT_BATCH_SIZE, USUAL_BATCH_SIZE)
        found = signature(session)
        return complete(config, found, size if found.batches else None)

    async def load(self, context: ModelContext) -> Instance:
        on_cpu = context.group.kind is not InstanceKind.KIND_GPU
        turns = self._turns if on_cpu else None  # made once, since it is made on the event loop
        threads = None if turns else SessionThreads.read(context.config, self.settings)
        pin = self._pin(context, threads) if threads else None
        if context.cpu_cores and pin is None:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"model '{context.config.name}' has a host policy with CPU cores, but all sessions "
                "share one pool of threads (--backend-config of onnxruntime)",
            )
        try:
            instance = await apart(
                self._load, context, threads, turns, pin, discard=OnnxRuntimeInstance.discard
            )
        except BaseException:
            if pin is not None:
                pin.end()
            raise
        return instance if pin is None else await _kept(instance, pin)

    def _pin(self, context: ModelContext, threads: SessionThreads) -> CorePin | None:
        if context.cpu_cores:
            return CorePin(context.cpu_cores, _not_taken)
        if context.group.kind is InstanceKind.KIND_GPU:
            return None
        return self._pins.take(context.config, threads.intra)

    def _load(
        self,
        context: ModelContext,
        threads: SessionThreads | None,
        turns: threading.Semaphore | None,
        pin: CorePin | None,
    ) -> OnnxRuntimeInstance:
        config = context.config
        plan = SessionPlan(
            context.name or config.name,
            threads,
            providers(config, context.group.kind, context.device),
        )
        with pin.kept() if pin else nullcontext():
            session = open_session(config, context.path, plan)
        check(config, signature(session))
        file = find_file(config, context.path, DEFAULT_FILE)
        steady = turns is None and is_steady(config, file, plan.providers)
        instance = OnnxRuntimeInstance(context, session, turns)  # starts a thread: must be last
        instance.steady = steady
        return instance

    @cached_property
    def _pins(self) -> CorePins:
        return CorePins()

    @cached_property
    def _turns(self) -> threading.Semaphore | None:
        """The limit of concurrent runs if all sessions share one pool, which is made here."""
        shared = SharedThreads.read(self.settings)
        if shared is None:
            return None
        onnxruntime.set_global_thread_pool_sizes(shared.pool, shared.inter)
        return threading.Semaphore(shared.runs)


async def _kept(instance: OnnxRuntimeInstance, pin: CorePin) -> OnnxRuntimeInstance:
    """The instance, bound to the cores; it is released with them if that fails."""
    try:
        await instance.keep_to(pin)
    except BaseException:
        instance.discard()
        raise
    return instance


def _not_taken(_: frozenset[int]) -> None:
    """Nothing to release: the cores of a host policy are shared."""
