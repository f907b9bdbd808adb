"""Opening of a session of ONNX Runtime, and failures of the library."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.onnxruntime.library import onnxruntime, state
from backends.onnxruntime.model_file import DEFAULT_FILE
from backends.onnxruntime.parameters import SessionThreads
from backends.onnxruntime.providers import CPU, Provider, require_installed
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.failures import ClearFailures
from gateway.tensor_runtime.model_files import find_file, find_libraries
from gateway.tensor_runtime.parameters import integer, switch

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    *(
        each
        for each in vars(state).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ),
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
)
"""All exceptions of the library: its own have no common base, and bindings raise Python's."""

NUMBERED = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : ")

LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""The levels of `optimization { graph { level } }`, as on Triton."""

MODES = {0: onnxruntime.ExecutionMode.ORT_SEQUENTIAL, 1: onnxruntime.ExecutionMode.ORT_PARALLEL}
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
SPINNING = "session.intra_op.allow_spinning"
"""Whether waiting threads spin; off by default, since spinning takes twice the processor time."""
SPINNING_INTER = "session.inter_op.allow_spinning"
SPINNING_STOP = "session.force_spinning_stop"
"""Whether spinning ends with the run."""
FATAL_ONLY = 4
"""Failures are raised, so the library need not write them to stderr."""


def clear_failures(folder: Path, what: str) -> ClearFailures:
    """A context for calls of the library; `what` begins the text of a failure."""
    return ClearFailures(folder, what, RUNTIME_ERRORS, _named)


def _named(text: str) -> str:
    number = NUMBERED.search(text)
    return f"onnx runtime error {number[1] if number else 1}: {NUMBERED.sub('', text)}"


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Options of a session to open; `threads` None means that it shares the pool of the process.

    With `spins_in_runs`, threads spin while a run continues, unless the model forbids it.
    """

    name: str
    threads: SessionThreads | None
    providers: Sequence[Provider]
    optimized: bool = True
    spins_in_runs: bool = False


def open_session(config: ModelConfig, folder: Path, plan: SessionPlan) -> Any:
    """Load the model of a version folder; blocks until it is loaded.

    Raises InferenceError if it cannot be loaded.
    """
    require_installed(plan.providers, plan.name)
    file = find_file(config, folder, DEFAULT_FILE)
    options = _options(config, plan)
    with clear_failures(folder, f"unable to load model '{config.name}'"):
        for library in find_libraries(config, folder):
            options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(
            str(file), options, providers=list(plan.providers), enable_fallback=0
        )
    _require_running(session, plan)
    return session


def _require_running(session: Any, plan: SessionPlan) -> None:
    # The library continues without a provider whose system libraries are missing.
    for provider, _ in plan.providers:
        if provider != CPU and provider not in session.get_providers():
            raise InferenceError(
                Code.UNAVAILABLE,
                f"instance '{plan.name}' needs {provider}, which is installed but did not start; "
                "its libraries (such as CUDA and cuDNN) may be missing or too old",
            )


def _options(config: ModelConfig, plan: SessionPlan) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_ONLY
    options.graph_optimization_level = _level(config) if plan.optimized else LEVELS[2]
    options.execution_mode = _mode(config.parameters)
    options.enable_cpu_mem_arena = switch(config.parameters, "enable_mem_arena", default=True)
    options.enable_mem_pattern = switch(config.parameters, "enable_mem_pattern", default=True)
    if DEVICE_ALLOCATOR in config.parameters:
        used = switch(config.parameters, DEVICE_ALLOCATOR, default=False)
        options.add_session_config_entry(DEVICE_ALLOCATOR, str(int(used)))
    _set_threads(options, config, plan)
    return options


def _set_threads(options: Any, config: ModelConfig, plan: SessionPlan) -> None:
    spins = switch(config.parameters, SPINNING, default=False)
    if plan.threads is None:
        options.use_per_session_threads = False
        options.add_session_config_entry(SPINNING_STOP, str(int(not spins)))
        return
    spins_in_runs = plan.spins_in_runs and SPINNING not in config.parameters
    options.add_session_config_entry(SPINNING, str(int(spins or spins_in_runs)))
    options.add_session_config_entry(SPINNING_INTER, str(int(spins)))
    if spins_in_runs:
        options.add_session_config_entry(SPINNING_STOP, "1")
    options.intra_op_num_threads = plan.threads.intra
    options.inter_op_num_threads = plan.threads.inter


def _level(config: ModelConfig) -> Any:
    graph = config.optimization.graph if config.optimization else None
    level = graph.level if graph else 0
    if level not in LEVELS:
        raise InferenceError(
            Code.INVALID_ARG,
            f"graph optimization level of model '{config.name}' is {level}, expected -1 (basic), "
            "0 (all), 1 (extended) or 2 (none)",
        )
    return LEVELS[level]


def _mode(parameters: Mapping[str, str]) -> Any:
    mode = integer(parameters, "execution_mode")
    if mode not in MODES:
        raise InferenceError(
            Code.INVALID_ARG,
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 "
            f"but got {mode} .",
        )
    return MODES[mode]
