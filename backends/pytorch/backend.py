"""The backend `pytorch`: TorchScript, programs of torch.export and packages of AOTInductor."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch._C import (
    _jit_set_profiling_executor,
    _jit_set_profiling_mode,
    _jit_set_texpr_fuser_enabled,
)

from backends.pytorch.checks import check_config, complete_from, describe_from
from backends.pytorch.exported import load_exported
from backends.pytorch.inductor import load_inductor
from backends.pytorch.instance import PytorchInstance
from backends.pytorch.model_file import FAILURES, FileKind, kind_of, load_failure, model_file
from backends.pytorch.parameters import PytorchParameters, ThreadBudget, thread_count
from backends.pytorch.signature import Program
from backends.pytorch.torchscript import load_torchscript
from gateway.backend import Backend, Description, Instance, ModelContext
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.signature import input_names, output_names
from gateway.threads import apart

T = TypeVar("T")


class PytorchBackend(Backend):
    """Loads programs; all instances on the CPU share one budget of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sharing = threading.Lock()
        self._threads: ThreadBudget | None = None
        self._shared: WeakValueDictionary[tuple[object, ...], Program] = WeakValueDictionary()

    @property
    def computes_on_gpus(self) -> bool:
        return bool(torch.cuda.is_available())

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Only programs of torch.export define all inputs and outputs."""
        PytorchParameters.read(config)
        file = model_file(config, path)
        if not (config.input and config.output) and kind_of(file) is FileKind.EXPORTED:
            config = _guarded(config, partial(complete_from, config, file, self.settings))
        check_config(config)
        return config

    def describe(self, config: ModelConfig, path: Path) -> Description:
        """The config in the file, with gaps for TorchScript and AOTInductor."""
        file = model_file(config, path)
        return _guarded(config, partial(describe_from, config, file, self.settings))

    async def load(self, context: ModelContext) -> Instance:
        return await apart(self._load, context, discard=PytorchInstance.discard)

    def _load(self, context: ModelContext) -> PytorchInstance:
        config, device = context.config, _device(context)
        threads = self._budget()
        self._prepare(config, threads)
        program = self._open(context, device)
        found = device or torch.device("cpu")
        return PytorchInstance(config, context.name or config.name, program, found, threads)

    def _budget(self) -> ThreadBudget:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadBudget(thread_count(self.settings))
            return self._threads

    def _prepare(self, config: ModelConfig, threads: ThreadBudget) -> None:
        """Set options of the whole process."""
        wanted = PytorchParameters.read(config)
        threads.ask(wanted.intra_op_thread_count, wanted.inter_op_thread_count, config.name)
        if wanted.disable_cudnn:
            torch.backends.cudnn.enabled = False
        switches = (
            (wanted.enable_jit_executor, _jit_set_profiling_executor),
            (wanted.enable_jit_profiling, _jit_set_profiling_mode),
            (wanted.enable_tensor_fuser, _jit_set_texpr_fuser_enabled),
        )
        for choice, switch in switches:
            if choice is not None:
                switch(choice)

    def _open(self, context: ModelContext, device: torch.device | None) -> Program:
        config, file = context.config, model_file(context.config, context.path)
        load = partial(_load_program, config, file, device)
        if not PytorchParameters.read(config).enable_weight_sharing:
            return _guarded(config, partial(load, 1))
        status = file.stat()
        names = (*input_names(config), *output_names(config))
        key = (file, status.st_ino, status.st_mtime_ns, device, *names)
        with self._sharing:
            program = self._shared.get(key)
            if program is None:
                runners = sum(max(1, group.count) for group in config.instance_group) or 1
                program = self._shared[key] = _guarded(config, partial(load, runners))
            return program


def _load_program(
    config: ModelConfig, file: Path, device: torch.device | None, runners: int
) -> Program:
    """The program, for `runners` concurrent threads."""
    wanted = str(device) if device else None
    match kind_of(file):
        case FileKind.EXPORTED:
            return load_exported(file, wanted)
        case FileKind.INDUCTOR:
            return load_inductor(file, wanted, runners)
        case _:
            return load_torchscript(file, wanted, input_names(config), output_names(config))


def _guarded(config: ModelConfig, work: Callable[[], T]) -> T:
    """The result of the work; exceptions of PyTorch become InferenceError."""
    try:
        return work()
    except FAILURES as error:
        raise load_failure(config, error) from error


def _device(context: ModelContext) -> torch.device | None:
    """The device of the instance; None keeps the model's own (KIND_MODEL)."""
    match context.group.kind:
        case InstanceKind.KIND_MODEL:
            return None
        case InstanceKind.KIND_GPU:
            return _gpu(context)
        case _:
            return torch.device("cpu")


def _gpu(context: ModelContext) -> torch.device:
    if context.device >= torch.cuda.device_count():
        raise InferenceError(
            Code.INVALID_ARG,
            f"instance group {context.group.name} of model {context.config.name} asks for GPU "
            f"{context.device}, PyTorch {torch.__version__} finds {torch.cuda.device_count()} GPUs",
        )
    return torch.device("cuda", context.device)
