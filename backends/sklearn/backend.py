"""The backend `sklearn`: estimators of scikit-learn, each instance in a worker process.

The gateway's process reads no model file: it only looks at the file's name.
"""

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backends.python.backend import PythonBackend
from backends.sklearn.instance import SklearnInstance
from gateway.backend import Backend, Fact, Instance, ModelContext
from gateway.batches.shapes import ANY_SIZE
from gateway.config import InstanceKind, ModelConfig, ModelInput, ModelOutput
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.completion import DEFAULT_BATCH_SIZE, is_complete, with_batching
from gateway.tensor_runtime.model_files import find_file
from gateway.tensor_runtime.parameters import count, switch

PROGRAM = Path(__file__).parent / "worker"
"""The folder of the Python-based backend that serves the models."""

SKOPS = ".skops"
PICKLES = (".joblib", ".pkl", ".pickle")
NAMES = tuple(f"model{suffix}" for suffix in (SKOPS, *PICKLES))
"""The names of a model's file, in the order of the search."""
ALLOW_PICKLE = "allow-pickle"
"""The option of `--backend-config` that permits pickles."""
PACKAGES = ("scikit-learn", "skops")
ROWS = 32768
"""The batch size of a model without one, as of forests."""
START_SECS, START_LIMIT = "120", "initialize_timeout_secs"
"""Longest load of a model whose config sets no limit: a pickle may run for ever."""


class SklearnBackend(Backend):
    """Runs the program that loads the estimator on the Python backend."""

    loads_side_by_side = True
    keeps_to_cores = True

    def __init__(self) -> None:
        self._workers = PythonBackend()

    @property
    def computes_on_gpus(self) -> bool:
        return False

    @property
    def facts(self) -> Sequence[Fact]:
        """The packages of a worker without an environment of its own; the gateway imports none."""
        return [_package(name) for name in PACKAGES]

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        await self._python().prepare(self._checked(config, path), path)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Add what is missing of inputs, outputs and batching, from the estimator in a worker."""
        checked = self._checked(config, path)
        if is_complete(checked):
            return checked
        return self._python().complete(self._with_batches(checked), path)

    async def load(self, context: ModelContext) -> Instance:
        if context.group.kind is InstanceKind.KIND_GPU:
            raise _refusal(context.config, "has instances of KIND_GPU, expected KIND_CPU or AUTO")
        checked = self._checked(context.config, context.path)
        limited = {START_LIMIT: START_SECS, **checked.parameters}
        checked = replace(checked, parameters=limited)
        worker = await self._python().load(replace(context, config=checked))
        return SklearnInstance(worker, checked)

    def _python(self) -> PythonBackend:
        return self._workers.for_program(self, PROGRAM)

    def _checked(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """The config with the name of the file to load, which the worker trusts."""
        if config.decoupled:
            raise _refusal(config, "is decoupled, but an estimator has one response per request")
        if config.sequence_batching is not None:
            raise _refusal(config, "has sequence_batching, but an estimator keeps no state")
        file = find_model(config, folder)
        # A client or a repository may write the config: only the command line permits pickles.
        if file.suffix in PICKLES and not switch(self.settings, ALLOW_PICKLE, default=False):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': '{file.name}' is a pickle, and loading one runs any "
                "program it holds; save it by skops, or convert it to ONNX, or start with "
                f"--backend-config=sklearn,{ALLOW_PICKLE}=true",
            )
        return replace(config, default_model_filename=str(file.relative_to(folder)))

    def _with_batches(self, config: ModelConfig) -> ModelConfig:
        """The config with a batch size, unless its dims have the rows as a first dimension."""
        if not config.batching and not any(map(_has_rows, _tensors(config))):
            size = count(self.settings, DEFAULT_BATCH_SIZE, ROWS)
            config = replace(config, max_batch_size=size)
        return with_batching(config)


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The model's file; InferenceError if it is missing, outside, or of another kind."""
    named = config.default_model_filename or NAMES[0]
    if named in NAMES:
        # The name may be that of another version's file.
        found = (name for name in (named, *NAMES) if (folder / name).is_file())
        named = next(found, named)
    file = find_file(replace(config, default_model_filename=named), folder, NAMES[0])
    if file.suffix not in (SKOPS, *PICKLES):
        raise _refusal(config, f"names '{file.name}', expected a file of {SKOPS} or a pickle")
    return file


def _package(name: str) -> Fact:
    try:
        return Fact(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Fact(name, "not installed", "pip install 'sluice[sklearn]'")


def _tensors(config: ModelConfig) -> Iterator[ModelInput | ModelOutput]:
    yield from config.input
    yield from config.output


def _has_rows(tensor: ModelInput | ModelOutput) -> bool:
    return tensor.dims[:1] == (ANY_SIZE,)


def _refusal(config: ModelConfig, why: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{config.name}' {why}")
