"""Builders of configs, requests, instances that tests drive by hand, and loaded models."""

import asyncio
import gc
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from gateway.backend import Answer, Begun, Instance, Reader
from gateway.config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.memory_settings import ModelMemory
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.models.kept_facts import FactsFolder
from gateway.models.mirrors import RemoteRepositories
from gateway.models.model import Model
from gateway.models.residents import Residents
from gateway.observability.request_record import Record
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import OF_MODEL
from gateway.observability.statistics import ModelStatistics
from gateway.observability.traceparent import NumberedIds
from gateway.observability.tracer import Tracer
from gateway.schedulers.execution import Entry
from gateway.settings import TraceSettings
from gateway.span_settings import SpanSettings
from gateway.stream import ResponseStream
from gateway.tensor import text_tensor
from gateway.threads import load_threads

T = TypeVar("T")

WAIT_SECS = 20.0
"""No wait of a test takes longer; one that does has failed."""

TEXT = ModelConfig(
    name="text",
    backend="identity",
    input=(ModelInput(name="text_input", data_type=DataType.TYPE_STRING, dims=(1,)),),
    output=(ModelOutput(name="text_output", data_type=DataType.TYPE_STRING, dims=(1,)),),
)
"""Text in, text out, one response."""

DECOUPLED = TransactionPolicy(decoupled=True)


def add_model(
    repository: Path,
    name: str,
    config: str | None = 'backend: "python"',
    versions: Sequence[str] = ("1",),
) -> Path:
    """The new folder of a model, with its config and empty versions."""
    folder = repository / name
    folder.mkdir(parents=True)
    for version in versions:
        (folder / version).mkdir()
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


async def soon(wait: Awaitable[T]) -> T:
    """Await what is about to happen."""
    async with asyncio.timeout(WAIT_SECS):
        return await wait


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: what has no reference is freed, cycles are not."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def settle() -> None:
    """Let everything run that can run, to see that nothing more happens."""
    for _ in range(5):
        await asyncio.sleep(0)


def text_request(text: str = "hello", model: str = "text", **fields: Any) -> InferRequest:
    """A request for a model like TEXT."""
    return InferRequest(model=model, inputs=(text_tensor("text_input", [text]),), **fields)


def text_response(text: str, *, final: bool = False, tokens: int | None = None) -> InferResponse:
    """A response of a model like TEXT; with tokens it has the usage of an LLM."""
    usage = None if tokens is None else Usage(prompt_tokens=0, completion_tokens=tokens)
    return InferResponse(outputs=(text_tensor("text_output", [text]),), final=final, usage=usage)


FLAG = InferResponse(final=True)
"""The final flag without data."""


def texts(responses: Iterable[InferResponse]) -> list[str]:
    """The text of each response; "" for one without outputs."""
    return ["".join(e.decode() for o in r.outputs for e in o.elements()) for r in responses]


async def read_all(stream: ResponseStream) -> list[str]:
    """The texts of all responses, to the end of the stream."""
    return texts([response async for response in stream])


def new_entry(
    statistics: ModelStatistics,
    request: InferRequest | None = None,
    batch_size: int = 1,
    ended: Callable[[Record], None] = lambda _: None,
) -> Entry:
    """A request as a scheduler gets it."""
    record = Record(statistics, batch_size, 0, ended)
    return Entry(request or text_request(), ResponseStream(record), record)


@dataclass(slots=True, eq=False)
class Execution:
    """One call of a scripted instance; `taken` counts the answers that the gateway has taken."""

    requests: tuple[InferRequest, ...]
    taken: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    steps: asyncio.Queue[Answer | Exception | None] = field(default_factory=asyncio.Queue)

    def answer(self, response: InferResponse | InferenceError, index: int = 0) -> None:
        """Answer one of the requests."""
        self.steps.put_nowait((index, response))

    def crash(self, error: Exception) -> None:
        """Raise."""
        self.steps.put_nowait(error)

    def end(self) -> None:
        """Return."""
        self.steps.put_nowait(None)

    def finish(self, text: str) -> None:
        """Answer the only request for the last time, and return."""
        self.answer(text_response(text, final=True))
        self.end()


class ScriptedInstance(Instance):
    """An instance that does what the test tells its executions.

    If it `has_singles`, schedulers need no task for a single request.
    """

    has_singles = False

    def __init__(self, concurrency: int | None = None) -> None:
        self.concurrency = concurrency
        self.executions: list[Execution] = []
        self.closes = 0
        self.closed = asyncio.Event()
        self._begun: asyncio.Queue[Execution] = asyncio.Queue()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.death = self._death
        if self.has_singles:
            self.singles = ScriptedSingles(self)

    @property
    def asked(self) -> list[str]:
        """The texts of all requests it was given, in order."""
        found = (tensor for each in self.executions for r in each.requests for tensor in r.inputs)
        return [element.decode() for tensor in found for element in tensor.elements()]

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        execution = Execution(tuple(requests))
        self.executions.append(execution)
        self._begun.put_nowait(execution)
        try:
            while (step := await execution.steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                execution.taken += 1
                yield step
        finally:
            execution.stopped.set()

    async def begun(self) -> Execution:
        """Wait for the next execution."""
        return await soon(self._begun.get())

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._death.done()

    def die(self, reason: str) -> None:
        """Execute no more."""
        self._death.set_result(reason)

    async def close(self) -> None:
        self.closes += 1
        self.closed.set()


class ScriptedSingles:
    """Executes single requests without a task of their scheduler."""

    def __init__(self, instance: ScriptedInstance) -> None:
        self._instance = instance

    def accepts(self, request: InferRequest) -> bool:
        return True

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        return ScriptedBegun(self._instance.execute([request]), reader)


class ScriptedBegun:
    """Passes on the answers of an execution: a task of the instance stands for its process."""

    def __init__(self, answers: AsyncGenerator[Answer, None], reader: Reader) -> None:
        self._reader = reader
        self._task = asyncio.create_task(self._pass_on(answers))
        self._task.add_done_callback(self._ended)

    def abandon(self) -> None:
        self._task.cancel()

    async def _pass_on(self, answers: AsyncGenerator[Answer, None]) -> None:
        async with aclosing(answers):
            async for _, answer in answers:
                self._reader.take(answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        assert error is None or isinstance(error, Exception)
        self._reader.over(error)


class StoppableInstance(ScriptedInstance):
    """Passes on to its model that a request should end early."""

    def __init__(self, concurrency: int | None = None) -> None:
        super().__init__(concurrency)
        self.stopped: list[InferRequest] = []

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for each in requests:
            if each.cancellation is not None:
                each.cancellation.subscribe(partial(self.stopped.append, each), may_stop=True)
        async with aclosing(super().execute(requests)) as answers:
            async for answer in answers:
                yield answer


async def death_of(instance: Instance) -> str:
    """Wait until an instance dies, and return the reason."""
    assert instance.death is not None
    return await asyncio.shield(instance.death)


def moments(trace: SpanTrace) -> list[tuple[int, str]]:
    """The times and names of the events of an ended trace, without those of `compute`."""
    of_model = trace.started_ns, trace.queued_ns, trace.ended_ns
    own = zip(trace.times, trace.names, strict=True)
    return sorted([*own, *zip(of_model, OF_MODEL, strict=True)], key=itemgetter(0))


class KeptTraces:
    """Keeps the traces that would become spans."""

    def __init__(self) -> None:
        self.kept: list[SpanTrace] = []
        self.drops = {"not_queued": 7, "rejected": 0}
        self.ids = NumberedIds()
        self.closed = 0

    def refuses(self) -> bool:
        return False

    def keep(self, trace: SpanTrace) -> None:
        self.kept.append(trace)

    def close(self) -> None:
        self.closed += 1

    def tracer(self, **fields: Any) -> Tracer:
        """A tracer of requests with a parent, unless the fields say otherwise."""
        given = {"levels": ("TIMESTAMPS",), "rate": 0, **fields}
        return Tracer(TraceSettings(spans=SpanSettings(), **given), self)

    @property
    def names(self) -> list[list[str]]:
        """The names of the events of each trace, in the order of their times."""
        return [[name for _, name in moments(each)] for each in self.kept]


class LoadedModels:
    """Stands where the control and its registry do, for a data plane over models of a test."""

    def __init__(self, *models: Model) -> None:
        self.settled = True
        self.changes = 0
        self.trouble: Mapping[str, str] = {}
        self._models = self._running = models
        self.registry = self.loaded = self
        self.remote = RemoteRepositories({})
        facts = FactsFolder(None)
        self.residents = Residents(ModelMemory(), load_threads(1), facts, lambda: None)

    def find(self, name: str, version: str) -> Model:
        """The named version, or the highest."""
        found = [each for each in self._models if each.name == name]
        if version:
            found = [each for each in found if each.version == version]
        if not found:
            raise InferenceError(
                Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found"
            )
        return found[-1]

    def address(self, name: str, version: str = "") -> tuple[str, str]:
        """The name and the version themselves: no model has labels."""
        return name, version

    def has_label(self, name: str, label: str) -> bool:
        """No version has a label."""
        return False

    def get(self, model: object) -> None:
        """No model is in a repository."""

    def forget(self) -> None:
        """Find none any more, as if all had been unloaded."""
        self._models = ()

    def models(self) -> Iterator[Model]:
        """All of them."""
        return iter(self._models)

    def ready_versions(self, name: str) -> list[Model]:
        """Those that serve."""
        return [each for each in self._models if each.name == name and each.ready]

    def failures(self) -> Mapping[str, str]:
        """The error that the test sets."""
        return self.trouble

    @property
    def in_flight(self) -> int:
        """Requests in flight in all models."""
        return sum(len(each.requests) for each in self._models)

    def requests(self) -> Iterator[tuple[Model, ResponseStream]]:
        """Requests in flight in all models, also in those that are forgotten."""
        return (
            (each, stream) for each in self._running for stream in tuple(each.requests.values())
        )

    async def sequences_ended(self) -> None:
        """Wait until no sequence takes any more requests."""
        for model in self._models:
            if model.scheduler.sequences is not None:
                await model.scheduler.sequences.ended()

    def notify(self) -> None:
        """No task waits for changes here."""


@dataclass
class Notebook:
    """Writes down what a stream tells its recorder."""

    lines: list[str] = field(default_factory=list)

    def responded(self, response: InferResponse) -> None:
        self.lines.append("responded")

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        self.lines.append(f"delivered {b' '.join(texts).decode()}")

    def taken(self) -> None:
        self.lines.append("taken")

    def wasted(self, response: InferResponse) -> None:
        self.lines.append("wasted")

    def ended(self, error: InferenceError | None) -> None:
        self.lines.append(f"ended: {error.reason if error else 'complete'}")
