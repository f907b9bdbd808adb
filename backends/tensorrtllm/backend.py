"""The backend `tensorrtllm`: LLMs by TensorRT-LLM's LLM API, each instance in a worker process."""

import asyncio
from copy import copy
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import orjson

from backends.python.backend import PythonBackend
from backends.tensorrtllm.instance import TensorRtLlmInstance
from backends.tensorrtllm.tensors import INPUTS, OUTPUTS
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError

PROGRAM = Path(__file__).parent / "worker"
"""The folder of the Python-based backend that serves the models."""


class TensorRtLlmBackend(Backend):
    """Runs the program with the engine on the Python backend, in the model's environment."""

    def __init__(self) -> None:
        self._workers = PythonBackend()
        self._siblings: WeakValueDictionary[tuple[str, Path], WeakSet[TensorRtLlmInstance]] = (
            WeakValueDictionary()
        )

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        await self._python().prepare(config, path)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Add missing inputs and outputs of the contract, and the settings of the model's file."""
        _check_counts(config)
        given = {each.name for each in INPUTS}
        named = {each.name for each in config.input}, {each.name for each in config.output}
        # Triton's ensemble requires a text and a length, which OpenAI's requests lack.
        inputs = [replace(i, optional=i.optional or i.name in given) for i in config.input]
        completed = replace(
            config,
            input=(*inputs, *(i for i in INPUTS if i.name not in named[0])),
            output=(*config.output, *(o for o in OUTPUTS if o.name not in named[1])),
            instance_group=config.instance_group
            or (InstanceGroup(kind=InstanceKind.KIND_MODEL, count=1),),
        )
        return self._python().complete(completed, path)

    async def load(self, context: ModelContext) -> Instance:
        names = await asyncio.to_thread(adapter_names, context.config.name, context.path)
        siblings = self._siblings.setdefault((context.config.name, context.path), WeakSet())
        return TensorRtLlmInstance(await self._python().load(context), names, siblings)

    def _python(self) -> PythonBackend:
        """The Python backend with the settings of this one."""
        found = copy(self._workers)
        found.settings, found.kept, found.home = self.settings, self.kept, PROGRAM
        return found


def _check_counts(config: ModelConfig) -> None:
    """Refuse counts above 1: every engine takes a share of its GPU's whole memory."""
    for group in config.instance_group:
        if group.count > 1:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': an instance group has count {group.count}, expected 1: an "
                "engine of TensorRT-LLM serves any number of requests at once (for several GPUs "
                "use tensor_parallel_size, or one KIND_GPU instance for each)",
            )


ADAPTERS_FILE = "multi_lora.json"


def adapter_names(model: str, folder: Path) -> tuple[str, ...]:
    """The names in `multi_lora.json` of the version folder; none without such a file."""
    try:
        content = orjson.loads((folder / ADAPTERS_FILE).read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _refusal(model, f"cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise _refusal(model, f"is not valid JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise _refusal(model, "must be a JSON object of names and the folders of their adapters")
    return tuple(content)


def _refusal(model: str, why: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{model}': its {ADAPTERS_FILE} {why}")
