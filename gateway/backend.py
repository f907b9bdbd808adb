"""The seam between the gateway and a runtime: backends, instances and their answers."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gateway.config import InstanceGroup, ModelConfig
from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse
from gateway.stream import ResponseStream

_numbers = count(1)


class Note(Enum):
    """An event of an execution that is not a response."""

    FREED = auto()
    """The instance takes another execution before this one ends; the index is ignored."""
    RESCHEDULED = auto()
    """The request is to be executed again; allowed for iterative sequences only."""


class NotSent(InferenceError):
    """Raised by `execute` if the runtime has not received the requests that are not done.

    Another instance may execute them.
    """


Answer = tuple[int, InferResponse | InferenceError | Note]
"""The index of a request within its execution, and a response, its final error, or a note."""


class ExportedMetric(Protocol):
    """A family of metrics: a `MetricReading`, or a `prometheus_client.core.Metric`.

    `type` is that of Prometheus' text format. `samples` have the members of `MetricSample`.
    """

    name: str
    documentation: str
    type: str
    samples: list[Any]


class Exemplar(NamedTuple):
    """One observation of a bucket; its labels name a trace. Its time is in seconds of the epoch."""

    labels: Mapping[str, str]
    value: float
    timestamp: float


class MetricSample(NamedTuple):
    """One value; its name is that of the family, or has a suffix such as `_bucket`."""

    name: str
    labels: Mapping[str, str]
    value: float
    exemplar: Exemplar | None = None


@dataclass(slots=True)
class MetricReading:
    """A family of metrics and its values, without prometheus_client, which takes 1 MiB."""

    name: str
    documentation: str
    type: str
    samples: list[MetricSample] = field(default_factory=list)

    def add_sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a value."""
        self.samples.append(MetricSample(name, labels, value))


class ModelControl(Protocol):
    """Loading of other models by a model; needs `--model-control-mode=explicit`."""

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload; `config` is JSON text or "", `files` have names like `file:1/a.onnx`.

        Raises InferenceError with Triton's texts.
        """

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Start unloading. Raises InferenceError with Triton's texts."""

    def ready(self, name: str, version: str) -> bool:
        """Whether a version is ready ("": the best); InferenceError if it is not a number."""

    def decoupled(self, name: str, version: str) -> bool:
        """Whether the model is decoupled; InferenceError if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """The inputs of `Backend.load`.

    `name` is the instance's, `group` its instance group, `device` the number of its GPU (0 on
    CPUs). Its threads are bound to `cpu_cores`, unless empty. `path` is the version folder,
    `store` the folder of models stored by `sluice fetch`. `infer` sends a request to another model
    of this server; `control` loads and unloads others. `wasted` takes the number of tokens that
    were generated for a request after its client had disconnected.
    """

    config: ModelConfig
    name: str = ""
    group: InstanceGroup = field(default_factory=InstanceGroup)
    device: int = 0
    cpu_cores: frozenset[int] = frozenset()
    path: Path
    store: Path
    infer: Callable[[InferRequest], ResponseStream]
    control: ModelControl | None = None
    wasted: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Description:
    """The configuration that a model's file contains.

    Unlike in a completed config, `data_type` and `dims` of tensors may be missing. `notes` maps
    names of tensors to remarks.
    """

    config: ModelConfig
    notes: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of this machine that affects a runtime.

    `fix` says how to remove a limitation; empty if there is none.
    """

    what: str
    found: str
    fix: str = ""


class Reader(Protocol):
    """The reader of an execution of one request without a task; its methods do not raise."""

    def take(self, answer: InferResponse | InferenceError | Note) -> None:
        """Take an answer that does not go to the request's sink."""

    def over(self, error: Exception | None) -> None:
        """Called once, when the instance can take another execution.

        The error is what the generator of `execute` would raise.
        """


class Begun(Protocol):
    """An execution of one request without a task."""

    def abandon(self) -> None:
        """Cancel it, as closing the generator of `execute` does; its end calls its reader."""


class SingleExecutions(Protocol):
    """Executions of one request without a task and a generator, a tenth of a small one's cost."""

    def accepts(self, request: InferRequest) -> bool:
        """Whether `begin` can execute this request now, instead of `Instance.execute`."""

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        """Execute one request; the reader is called on the event loop, maybe before this returns.

        An exception of this call is that of the execution, which has not begun then.
        """


class Sleeper(Protocol):
    """Frees memory of an idle instance, which is not closed and executes nothing until `wake`.

    After an exception the instance is closed, and loaded again when it is needed.
    """

    async def sleep(self) -> None:
        """Free the memory; called after the last execution."""

    async def wake(self) -> None:
        """Take the memory again; executions may follow."""


class Instance(ABC):
    """One loaded, runnable copy of a model.

    `concurrency` is how many executions it takes at once; None means that it batches in flight
    and takes every request immediately, of which it executes as many at once as it has `places`,
    None if it does not say. It is `alive` while it can execute: False is final, and
    `death` soon becomes the reason; None if it never dies by itself. `adapters` are further model
    names for OpenAI clients. `max_model_len` is the limit of tokens of prompt and answer together,
    None without a limit. Within `sharing`, executions take as long as concurrent ones: the
    scheduler measures them so. It `has_process` if another process executes. `singles` execute
    single requests without a task; None if all need one. `sleeper` frees memory; without one the
    instance of a model that sleeps is closed, and another one loaded.

    A runtime implements `execute` and `close`; the others have defaults.
    """

    concurrency: int | None = 1
    places: int | None = None
    alive: bool = True
    has_process: bool = False
    death: asyncio.Future[str] | None = None
    adapters: Sequence[str] = ()
    max_model_len: int | None = None
    sharing: AbstractContextManager[object] = nullcontext()
    singles: SingleExecutions | None = None
    sleeper: Sleeper | None = None

    @cached_property
    def number(self) -> int:
        """Its number in this process, which no other instance has."""
        return next(_numbers)

    @property
    def metrics(self) -> Iterable[ExportedMetric]:
        """The current metrics of the runtime, with its own labels."""
        return ()

    @property
    def waits_for(self) -> Iterable[str]:
        """The models that its executions wait for now."""
        return ()

    @abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        """Answer the requests: in any order, any number of responses each.

        A request is done at its final response, at its error, or when the generator ends. An
        exception fails every request that is not done; NotSent lets another instance execute
        them. Closing the generator cancels the execution: abort what can be aborted. A single
        request of several is cancelled by its `cancellation`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything; called once, after the last execution."""

    def kill(self, reason: str) -> None:  # noqa: B027 - optional
        """End immediately, if possible: executions fail, and `close` returns soon."""

    async def check_ready(self) -> None:
        """Raise InferenceError if the model reports that it is not ready.

        Called by health checks, also during executions.
        """
        return


class ForwardingInstance(Instance):
    """An instance in front of another one, which it reports on and ends.

    A subclass changes the requests or the responses in `execute`.
    """

    def __init__(self, inner: Instance) -> None:
        self._inner = inner
        self.number = inner.number
        self.concurrency = inner.concurrency
        self.places = inner.places
        self.death = inner.death
        self.adapters = inner.adapters
        self.max_model_len = inner.max_model_len
        self.sharing = inner.sharing
        self.has_process = inner.has_process
        self.sleeper = inner.sleeper

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._inner.alive

    @property
    def metrics(self) -> Iterable[ExportedMetric]:
        return self._inner.metrics

    @property
    def waits_for(self) -> Iterable[str]:
        return self._inner.waits_for

    def kill(self, reason: str) -> None:
        self._inner.kill(reason)

    async def check_ready(self) -> None:
        await self._inner.check_ready()

    async def close(self) -> None:
        await self._inner.close()


class Backend(ABC):
    """One runtime. Created once per process, when the first model asks for it.

    The constructor imports all modules of the runtime: backends are created one at a time, but
    models load concurrently, and concurrent imports yield partial modules.
    These attributes are set before any method is called: `settings` has the values of
    `--backend-config`. `kept` is a folder for files that are slow to build; it may not exist, other
    gateways may share it, and it is None if this user has no such folder. `home` is the folder of
    a Python-based backend, whose model.py serves every model that names it; otherwise None.
    `loads_side_by_side`: instances of one model may be loaded concurrently.
    `keeps_to_cores`: instances run on the CPU cores that their contexts name.
    """

    settings: Mapping[str, str] = NO_PARAMETERS
    kept: Path | None = None
    home: Path | None = None
    loads_side_by_side: bool = False
    keeps_to_cores: bool = False

    @property
    def computes_on_gpus(self) -> bool:
        """Whether the installed runtime supports GPUs; read only if a GPU is usable.

        If not, instances of KIND_AUTO are placed on the CPU.
        """
        return True

    @property
    def facts(self) -> Sequence[Fact]:
        """Properties of this machine that affect the runtime, for `sluice doctor`."""
        return ()

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        """Build what loading needs and takes long to build; called before `complete`.

        Cancelled if the load is cancelled. Raises InferenceError if the build fails.
        """
        return

    @abstractmethod
    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Complete a config from the model itself (inputs, outputs); `path`: the version folder.

        Raises InferenceError if the config contradicts the model or the runtime.
        """

    def describe(self, config: ModelConfig, path: Path) -> Description:
        """The configuration for `sluice config`; by default that of `complete`."""
        return Description(self.complete(config, path))

    @abstractmethod
    async def load(self, context: ModelContext) -> Instance:
        """Load one instance, off the event loop. Raises InferenceError if it cannot be loaded."""
