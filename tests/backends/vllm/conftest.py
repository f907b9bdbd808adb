"""The real engine with the real model, as a backend's caller sees it."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from backends.vllm.backend import VllmBackend
from gateway.backend import Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.settings import ENVIRONMENT
from gateway.storage.store import ModelStore, default_root
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor

MODEL = "smollm2-135m-instruct"
CONTEXT = 1024
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."


def ask(text: str | None = QUESTION, /, **given: Any) -> InferRequest:
    """A request: what the contract has as inputs becomes a tensor, the rest a parameter."""
    inputs = [] if text is None else [text_tensor("text_input", [text])]
    parameters = {}
    for name, value in given.items():
        if isinstance(value, bool) and name not in ("ignore_eos", "flat_logprobs", "detokenize"):
            inputs.append(array_tensor(name, Datatype.BOOL, np.array([value])))
        elif name in ("messages", "sampling_parameters", "embedding_request"):
            inputs.append(text_tensor(name, [json.dumps(value)]))
        elif name == "image":
            inputs.append(Tensor(name, Datatype.BYTES, (len(value),), tuple(value)))
        else:
            parameters[name] = value
    return InferRequest(model="llama", inputs=tuple(inputs), parameters=parameters)


def openai(body: Any, endpoint: str = "", /) -> InferRequest:
    """A request of OpenAI's; a body that is a text goes as it is."""
    content = body if isinstance(body, str) else json.dumps(body)
    inputs = [text_tensor("openai_request", [content])]
    if endpoint:
        inputs.append(text_tensor("openai_endpoint", [endpoint]))
    return InferRequest(model="llama", inputs=tuple(inputs))


@dataclass(slots=True)
class Llama:
    """A loaded instance, and what it reports as wasted."""

    instance: Instance
    wasted: list[int] = field(default_factory=list)

    async def answers(self, request: InferRequest) -> list[InferResponse]:
        """Every response; raises the error if there is one."""
        found = []
        async for index, answer in self.instance.execute([request]):
            assert index == 0
            if isinstance(answer, InferenceError):
                raise answer
            found.append(answer)
        assert [response.final for response in found] == [False] * (len(found) - 1) + [True]
        return found

    async def chunks(self, request: InferRequest) -> list[Any]:
        """What each response to a request of OpenAI's has as JSON."""
        responses = await self.answers(request)
        return [json.loads(strings(each, "openai_response")[0]) for each in responses]

    async def whole(self, request: InferRequest) -> Any:
        """The one answer to a request of OpenAI's that does not stream."""
        (answer,) = await self.chunks(request)
        return answer

    async def say(self, request: InferRequest) -> str:
        """The text of all responses."""
        responses = await self.answers(request)
        return "".join(strings(response, "text_output")[0] for response in responses)

    def metric(self, name: str) -> float:
        """The value of a series that has one sample."""
        samples = [s for family in self.instance.metrics() for s in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)

    async def running(self, count: int) -> None:
        """Wait until the engine works on so many requests; it tells so with each step it makes."""
        async with asyncio.timeout(10):
            while self.metric("vllm:num_requests_running") != count:  # noqa: ASYNC110 - a gauge
                await asyncio.sleep(0.01)


def strings(response: InferResponse, name: str) -> list[str]:
    """The elements of a BYTES output."""
    output = response.output(name)
    assert output is not None
    return [element.decode() for element in output.elements()]


def numbers(response: InferResponse, name: str) -> list[Any]:
    """The elements of any other output."""
    output = response.output(name)
    assert output is not None
    found: list[Any] = output.array().tolist()
    return found


Write = Callable[..., ModelContext]


@pytest.fixture(scope="session")
def store() -> Path:
    """Where the model is stored; without it, or without vLLM, the tests are skipped."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    root = default_root(ENVIRONMENT)
    if not ModelStore(root).has(MODEL):
        pytest.skip(f"the model is not stored: run `sluice fetch {MODEL}`")
    with ThreadPoolExecutor(1) as thread:
        # As the gateway does: after an import in the main thread, engines of tests that have ended
        # are alive until the interpreter is not, and complain then.
        thread.submit(VllmBackend).result()
    return root


@pytest.fixture(scope="module")
def write(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Write a model's files, and make what its backend is given to load it."""

    def written(
        name: str = "llama",
        files: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        wasted: Callable[[int], None] = lambda tokens: None,
        **arguments: Any,
    ) -> ModelContext:
        folder = tmp_path_factory.mktemp(name) / "1"
        folder.mkdir()
        engine = {
            "model": MODEL,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 512 << 20,
            "max_model_len": CONTEXT,
        }
        for file, content in {"model.json": engine | arguments, **(files or {})}.items():
            (folder / file).write_text(json.dumps(content))
        config = ModelConfig(name=name, backend="vllm", parameters=parameters or {})
        return ModelContext(
            config=VllmBackend().complete(config, folder),
            path=folder,
            store=store,
            infer=_ask_nobody,
            wasted=wasted,
        )

    return written


def _ask_nobody(request: InferRequest) -> Any:
    raise AssertionError("an engine asks no other model")


def engine_processes() -> list[psutil.Process]:
    """The processes of the engines that this process itself has started.

    Servers that other tests keep running have engines, too; those are their children, not ours.
    """
    engines = [each for each in psutil.Process().children() if each.name().startswith("VLLM")]
    return [
        process
        for engine in engines
        for process in (engine, *engine.children(recursive=True))
        if process.name().startswith("VLLM") and process.status() != psutil.STATUS_ZOMBIE
    ]
