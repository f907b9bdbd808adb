"""The backend `openvino_genai`: LLMs on CPUs by OpenVINO GenAI, each in a worker process.

The inputs and outputs are those of Triton's vLLM backend, and OpenAI's requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from backends.python.backend import PythonBackend
from backends.python.llm_instance import LlmInstance
from gateway.backend import Backend, Fact, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, TransactionPolicy
from gateway.errors import Code, InferenceError
from gateway.generation import EMBEDDING_REQUEST, IMAGE, INPUTS, OUTPUTS
from gateway.process_limits import processors, quota
from gateway.threads import apart

PROGRAM = Path(__file__).parent / "worker"
"""The folder of the Python-based backend that serves the models."""
LIBRARY, REQUIRED = "openvino-genai", ("openvino", "openvino-tokenizers")
INSTALL = "pip install 'sluice[openvino_genai]'"
DEFAULT_FILE = "model.json"
DEFAULT_SEQUENCES = 256
"""`max_num_seqs` of a model whose settings have none, as in the worker."""
STORED_MODEL = "stored_model"
UNSERVED = (IMAGE, EMBEDDING_REQUEST)
"""Inputs of other LLM backends."""
PARAMETERS = {
    # A step of a large model on few cores takes seconds, and answers no health check meanwhile.
    "health_check_secs": "60",
}
"""Parameters of the Python backend with another default."""
PARSERS = ("tool_call_parser", "reasoning_parser")
"""Parameters of other LLM backends, which must not be ignored: they change the answer."""


class OpenVinoGenAiBackend(Backend):
    """Runs the program with the engine on the Python backend."""

    def __init__(self) -> None:
        self._workers = PythonBackend()

    @property
    def computes_on_gpus(self) -> bool:
        return False

    @property
    def facts(self) -> Sequence[Fact]:
        """Whether the gateway's environment has the library; a model may have one of its own."""
        for name in (LIBRARY, *REQUIRED):
            if not _version(name):
                return (Fact("library", f"{name} is not installed", INSTALL),)
        return (Fact("library", _version(LIBRARY)),)

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        await self._python().prepare(config, path)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Add missing inputs and outputs of the contract; the model is decoupled."""
        _check_groups(config)
        _check_parsers(config)
        inputs = {each.name for each in config.input}
        outputs = {each.name for each in config.output}
        served = [each for each in INPUTS if each.name not in UNSERVED]
        return replace(
            config,
            max_batch_size=0,
            input=(*config.input, *(i for i in served if i.name not in inputs)),
            output=(*config.output, *(o for o in OUTPUTS if o.name not in outputs)),
            model_transaction_policy=TransactionPolicy(decoupled=True),
            instance_group=config.instance_group
            or (InstanceGroup(kind=InstanceKind.KIND_CPU, count=1),),
        )

    async def load(self, context: ModelContext) -> Instance:
        settings = await apart(_settings, context)
        added = await apart(_parameters, context, settings)
        parameters = {**added, **context.config.parameters}
        config = replace(context.config, parameters=parameters)
        found = LlmInstance(await self._python().load(replace(context, config=config)))
        found.places = _places(settings)
        return found

    def _python(self) -> PythonBackend:
        return self._workers.for_program(self, PROGRAM)


def _version(name: str) -> str:
    """The version of a distribution; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _check_groups(config: ModelConfig) -> None:
    for group in config.instance_group:
        if group.count > 1:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': an instance group has count {group.count}, expected 1: an "
                "engine of OpenVINO GenAI serves any number of requests at once",
            )
        if group.kind == InstanceKind.KIND_GPU:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': an instance group is KIND_GPU, expected KIND_CPU: "
                "OpenVINO GenAI models are served on CPUs; use the backend 'vllm' on GPUs",
            )


def _check_parsers(config: ModelConfig) -> None:
    for name in PARSERS:
        if config.parameters.get(name):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': parameter '{name}' is '{config.parameters[name]}', "
                "expected none: OpenVINO GenAI models have no parsers; remove it, or use the "
                "backend 'vllm'",
            )


def _parameters(context: ModelContext, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Parameters for the worker: its threads, and the stored model that its settings name."""
    threads = len(context.cpu_cores) or processors()
    if (share := quota()) is not None:
        threads = min(threads, max(1, math.floor(share)))
    found = {**PARAMETERS, "engine_threads": str(threads)}
    name = _named_model(settings)
    if name and (context.store / name).is_dir():
        found[STORED_MODEL] = name
    return found


def _settings(context: ModelContext) -> Mapping[str, Any]:
    """The model's settings, empty without any; the worker reports wrong files."""
    file = context.path / (context.config.default_model_filename or DEFAULT_FILE)
    try:
        settings = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _named_model(settings: Mapping[str, Any]) -> str:
    """The plain name of a stored model, "" without one."""
    name = settings.get("model")
    return name if isinstance(name, str) and Path(name).name == name else ""


def _places(settings: Mapping[str, Any]) -> int:
    """The sequences that the engine has at once."""
    most = settings.get("max_num_seqs")
    return most if isinstance(most, int) and most > 0 else DEFAULT_SEQUENCES
