"""The real engine with a model of one layer, as a caller of the backend sees it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from backends.vllm.backend import VllmBackend
from gateway.backend import Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.settings import ENVIRONMENT
from gateway.storage.store import ModelStore, default_root
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.backends.vllm.adapters import write_adapter
from tests.backends.vllm.engine_forks import engines_fork, preload
from tests.backends.vllm.processes import engine_processes
from tests.one_layer import write_one_layer

MODEL = "smollm2-135m-instruct"
CONTEXT = 1024
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."

REST_SECS = 60.0
"""The longest answer of a test takes less; a test that fails may leave one to the next."""

OPENING = "backends.vllm.opening"

FOLDER = Path(__file__).parent
LAST = ("ended_llama", "ended_embedder", "ended_pair")
"""Fixtures of tests that end a shared engine."""

engine_marks = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated"),
]
"""Marks of tests of a shared engine, which runs on the event loop of the session."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder run first; those of the engine with two clients first, to end it."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Tests that end a shared engine are the last that use it."""
    if not item.path.is_relative_to(FOLDER):
        return 2, False
    names = set(getattr(item, "fixturenames", ()))
    return "shared_pair" not in names, not names.isdisjoint(LAST)


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
    """A loaded instance, what it reports as wasted, and what runs behind it.

    `llm` is the AsyncLLM of an engine with one client; `processes` are those of the engine.
    """

    instance: Instance
    wasted: list[int] = field(default_factory=list)
    llm: Any = None
    processes: frozenset[psutil.Process] = frozenset()
    closed: bool = False

    async def close(self) -> None:
        """Close the instance, once."""
        if not self.closed:
            self.closed = True
            await self.instance.close()

    def process(self, name: str) -> psutil.Process:
        """The process of the engine with this word in its name."""
        (found,) = [each for each in self.processes if name in each.name()]
        return found

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
        """The JSON of each response to a request of OpenAI's."""
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
        samples = [s for family in self.instance.metrics for s in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)

    async def running(self, count: int, within: float = 10.0) -> None:
        """Wait for a number of requests in the engine, which reports it with each step."""
        async with asyncio.timeout(within):
            while self.metric("vllm:num_requests_running") != count:  # noqa: ASYNC110 - a gauge
                await asyncio.sleep(0.01)

    async def serves_on(self) -> None:
        """The engine answers the next request: one token shows it."""
        assert await self.say(ask(stream=True, temperature=0, max_tokens=1)) == "The"


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
    """The folder of the stored model; without it, or without vLLM, the tests are skipped."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    root = default_root(ENVIRONMENT)
    if not ModelStore(root).has(MODEL):
        pytest.skip(f"the model is not stored: run `sluice fetch {MODEL}`")
    preload()
    return root


@pytest.fixture(scope="session")
def one_layer(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model of one layer."""
    return str(write_one_layer(tmp_path_factory.mktemp("models") / "one-layer", store / MODEL))


@pytest.fixture(scope="session")
def write(store: Path, one_layer: str, tmp_path_factory: pytest.TempPathFactory) -> Write:
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
            "model": one_layer,
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
            infer=_ask_no_model,
            wasted=wasted,
        )

    return written


def _ask_no_model(request: InferRequest) -> Any:
    raise AssertionError("an engine asks no other model")


class Shared:
    """An engine for many tests; one that has died, or that a test has closed, is started anew."""

    def __init__(self, load: Callable[[], Awaitable[Llama]]) -> None:
        self._load = load
        self._llama: Llama | None = None

    async def get(self) -> Llama:
        """The engine, without a request."""
        if self._llama is not None and not self._llama.instance.alive:
            await self._llama.close()
        if self._llama is None or self._llama.closed:
            self._llama = await self._load()
        await self._llama.running(0, within=REST_SECS)
        return self._llama

    async def close(self) -> None:
        """End the engine, if there is one."""
        if self._llama is not None:
            await self._llama.close()


@pytest.fixture(scope="session")
def backend(store: Path) -> VllmBackend:
    """The backend that loads every shared engine."""
    return VllmBackend()


async def loaded(backend: VllmBackend, context: ModelContext, wasted: list[int]) -> Llama:
    """Load a model, and find out what runs behind it."""
    started: list[Any] = []
    before = set(engine_processes())
    with engines_fork(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{OPENING}.start_engine", _noted(started))
        instance = await backend.load(context)
    processes = frozenset(set(engine_processes()) - before)
    return Llama(instance, wasted, *started[:1] or [None], processes=processes)


async def loaded_before(llama: Llama, context: ModelContext) -> Llama:
    """Load a model whose engine is one that runs already: nothing else is started."""

    async def start(*_: object) -> Any:
        return llama.llm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{OPENING}.start_engine", start)
        return Llama(await VllmBackend().load(context))


@contextmanager
def stops_kept() -> Iterator[list[Any]]:
    """In this block no engine is stopped; the list has those that would have been."""
    kept: list[Any] = []

    async def stop(engine: Any) -> None:
        kept.append(engine)

    with pytest.MonkeyPatch.context() as patch:
        for module in (OPENING, "backends.vllm.instance"):
            patch.setattr(f"{module}.stop_engine", stop)
        yield kept


def _noted(started: list[Any]) -> Callable[..., Awaitable[Any]]:
    from backends.vllm.engine import start_engine

    async def start(*arguments: Any) -> Any:
        started.append(await start_engine(*arguments))
        return started[-1]

    return start


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the adapter `odd`."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "odd", rank=8)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_llama(backend: VllmBackend, write: Write, adapter: str) -> AsyncIterator[Shared]:
    """The engine that generates: with an adapter, a parser of tool calls, and custom metrics."""

    async def load() -> Llama:
        wasted: list[int] = []
        context = write(
            files={"multi_lora.json": {"odd": adapter}},
            parameters={"REPORT_CUSTOM_METRICS": "true", "tool_call_parser": "hermes"},
            wasted=wasted.append,
            enable_lora="true",
        )
        return await loaded(backend, context, wasted)

    shared = Shared(load)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_embedder(backend: VllmBackend, write: Write) -> AsyncIterator[Shared]:
    """The engine that embeds."""

    async def load() -> Llama:
        return await loaded(backend, write("embedder", runner="pooling", convert="embed"), [])

    shared = Shared(load)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="session")
async def llama(shared_llama: Shared) -> AsyncIterator[Llama]:
    """The engine that generates; it has no request before a test, nor after it."""
    found = await shared_llama.get()
    yield found
    await found.running(0)


@pytest_asyncio.fixture(loop_scope="session")
async def embedder(shared_embedder: Shared) -> Llama:
    """The engine that embeds."""
    return await shared_embedder.get()


@pytest_asyncio.fixture(loop_scope="session")
async def ended_llama(shared_llama: Shared) -> AsyncIterator[Llama]:
    """The engine that generates, for a test that ends it."""
    found = await shared_llama.get()
    yield found
    await found.close()


@pytest_asyncio.fixture(loop_scope="session")
async def ended_embedder(shared_embedder: Shared) -> AsyncIterator[Llama]:
    """The engine that embeds, for a test that ends it."""
    found = await shared_embedder.get()
    yield found
    await found.close()
