"""Sessions of TensorFlow, each with one model; instances may share one."""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.tensorflow.library import CallableOptions, clear_failures, tf
from backends.tensorflow.model_file import ModelFile
from backends.tensorflow.parameters import INIT_OPS_FILE, TensorFlowParameters
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.model_files import file_below, find_libraries

log = logging.getLogger("sluice.tensorflow")

MOST_CALLS = 32
"""Clients choose the outputs of a call, and each choice takes memory."""
INIT_OPS = "init_ops"

Call = Callable[..., Sequence[Any]]
"""Takes the inputs as arrays in the order of their names, and returns the outputs."""


class SharedSession:
    """A session that is closed with the last instance that uses it."""

    def __init__(self, session: Any, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._lock = threading.Lock()
        self._calls: dict[tuple[Sequence[str], Sequence[str]], Call] = {}
        self._joined = 0
        self._users = 0

    def joined(self, most: int) -> bool:
        """Add a user; False if as many have joined as may, or if the session is closed."""
        with self._lock:
            if self._joined >= most or (self._joined and not self._users):
                return False
            self._joined += 1
            self._users += 1
            return True

    def leave(self) -> None:
        """Remove a user; the session is closed after the last one."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._calls.clear()
            self._session.close()

    def call(self, inputs: Sequence[str], outputs: Sequence[str]) -> Call:
        """The function that computes these outputs of these inputs."""
        key = (inputs, outputs)
        if (found := self._calls.get(key)) is not None:
            return found
        with self._lock:
            if len(self._calls) >= MOST_CALLS:
                self._calls.pop(next(iter(self._calls)))
            options = CallableOptions()
            options.feed.extend(self._inputs[name] for name in inputs)
            options.fetch.extend(self._outputs[name] for name in outputs)
            made: Call = self._session._make_callable_from_options(options)  # noqa: SLF001 - run() takes ten times the processor time
            self._calls[key] = made
            return made


def open_session(
    config: ModelConfig, folder: Path, file: ModelFile, parameters: TensorFlowParameters
) -> SharedSession:
    """Open a model; blocks until its variables are read.

    Raises InferenceError if it cannot be opened.
    """
    _check_accelerators(config)
    with clear_failures(folder, f"unable to load model '{config.name}'"):
        for library in find_libraries(config, folder):
            tf.load_op_library(str(library))
        graph = tf.Graph()
        session = tf.Session(graph=graph, config=_options(parameters))
        try:
            _fill(session, config, folder, file, parameters)
            outputs = _distinct(graph, file)
        except BaseException:
            session.close()
            raise
    return SharedSession(session, file.inputs, outputs)


def _check_accelerators(config: ModelConfig) -> None:
    policy = config.optimization and config.optimization.execution_accelerators
    if policy and policy.cpu_execution_accelerator:
        raise InferenceError(
            Code.UNSUPPORTED, "CPU Execution Accelerator is not supported in TensorFlow backend"
        )
    if policy and policy.gpu_execution_accelerator:
        log.warning(
            "GPU Execution Accelerator will be ignored for model instance on CPU",
            extra={"model": config.name},
        )


def _options(parameters: TensorFlowParameters) -> Any:
    return tf.ConfigProto(
        device_count={"GPU": 0},
        intra_op_parallelism_threads=parameters.intra_threads,
        inter_op_parallelism_threads=parameters.inter_threads,
        use_per_session_threads=True,
        allow_soft_placement=parameters.soft_placement,
        gpu_options=tf.GPUOptions(per_process_gpu_memory_fraction=parameters.gpu_memory_fraction),
    )


def _fill(
    session: Any,
    config: ModelConfig,
    folder: Path,
    file: ModelFile,
    parameters: TensorFlowParameters,
) -> None:
    """Load graph and variables into a session."""
    if file.graph_def is None:
        tf.saved_model.load(session, [parameters.tag], str(file.path))
        return
    with session.graph.as_default():
        tf.import_graph_def(file.graph_def, name="")
    for name in _init_ops(config, folder, parameters.init_ops_file):
        session.run(session.graph.get_operation_by_name(name))


def _init_ops(config: ModelConfig, folder: Path, name: str) -> Sequence[str]:
    """The names in the file, which is in the version folder or else in the model's."""
    if not name:
        return ()
    places = [file_below(folder.parent, place, name, config) for place in (folder, folder.parent)]
    found = next((each for each in places if each.is_file()), None)
    if found is None:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{name}', the {INIT_OPS_FILE} of model '{config.name}', in its "
            "version folder or its folder",
        )
    try:
        names = json.loads(found.read_bytes())[INIT_OPS]
    except (ValueError, KeyError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InferenceError(
            Code.INVALID_ARG,
            f"{INIT_OPS_FILE} '{name}' of model '{config.name}' is expected to be JSON such as "
            f'{{"{INIT_OPS}": ["init"]}}',
        )
    return names


def _distinct(graph: Any, file: ModelFile) -> dict[str, str]:
    """The tensors of the outputs; a copy of one that is an input, which cannot be fetched."""
    fed = set(file.inputs.values())
    with graph.as_default():
        return {
            name: tf.identity(graph.get_tensor_by_name(tensor)).name if tensor in fed else tensor
            for name, tensor in file.outputs.items()
            if tensor
        }
