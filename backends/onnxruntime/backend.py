"""The backend `onnxruntime`: ONNX models by ONNX Runtime, on the CPU or on a GPU."""

import logging
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from backends.onnxruntime.instance import OnnxRuntimeInstance
from backends.onnxruntime.library import onnxruntime
from backends.onnxruntime.lone_runs import ActiveRuns, LoneRuns, SessionPair
from backends.onnxruntime.model_file import DEFAULT_FILE, is_steady, signature
from backends.onnxruntime.parameters import (
    CorePin,
    CorePins,
    SessionThreads,
    SharedThreads,
    lone_threads,
)
from backends.onnxruntime.providers import CPU, CUDA, providers
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
from gateway.tensor_runtime.model_files import FileStamp, file_stamps, find_file
from gateway.tensor_runtime.parameters import count
from gateway.threads import apart

log = logging.getLogger("sluice.onnxruntime")

Key = tuple[Path, frozenset[FileStamp], str]
"""The folder, the files and the config of instances that share sessions."""


class OnnxRuntimeBackend(Backend):
    """Each instance has a session of its own, as on Triton; instances of one thread share theirs.

    Instances on parts of the cores share a session of all cores, for runs that are alone.
    """

    keeps_to_cores = True

    def __init__(self) -> None:
        self._active = ActiveRuns()
        self._lone_runs: WeakValueDictionary[Key, LoneRuns] = WeakValueDictionary()

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
        file = find_file(config, context.path, DEFAULT_FILE)
        steady = turns is None and is_steady(config, file, plan.providers)
        counts = turns is None and not steady and context.group.kind is not InstanceKind.KIND_GPU
        session = self._session(context, plan, pin, may_be_wide=counts and not context.cpu_cores)
        check(config, signature(session))
        turn = self._active if counts else turns
        instance = OnnxRuntimeInstance(context, session, turn)  # starts a thread: must be last
        instance.steady = steady
        if counts:
            instance.sharing = self._active
        return instance

    def _session(
        self, context: ModelContext, plan: SessionPlan, pin: CorePin | None, *, may_be_wide: bool
    ) -> Any:
        """A session of the instance's own, with one of all cores for lone runs where that helps."""
        config, folder = context.config, context.path
        every = lone_threads(config, self.settings) if may_be_wide else None
        is_plain = not config.model_operations and all(name == CPU for name, _ in plan.providers)
        key = (folder, file_stamps(folder), repr(config)) if every and is_plain else None
        lone = self._lone_runs.get(key) if key else None
        if lone is not None and lone.narrow is not None:
            return SessionPair(lone.narrow, lone)
        with pin.kept() if pin else nullcontext():
            own = open_session(config, folder, plan)
        if key is None:
            return own
        if lone is None:
            wide = _wide(context, replace(plan, threads=every, spins_in_runs=True))
            if wide is None:
                return own
            narrow = own if plan.threads == SessionThreads(1, 1) else None
            lone = self._lone_runs[key] = LoneRuns(config.name, narrow, wide, self._active)
        return SessionPair(own, lone)

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


def _wide(context: ModelContext, plan: SessionPlan) -> Any:
    """The session of all cores; None if it cannot be opened, such as for lack of memory."""
    try:
        return open_session(context.config, context.path, plan)
    except InferenceError as error:
        about = {"model": context.config.name, "reason": error.reason}
        log.warning("session of all cores not opened", extra=about)
        return None


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
