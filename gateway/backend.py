"""The seam: what a runtime implements to be served."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from prometheus_client.core import Metric

from gateway.config import InstanceGroup, ModelConfig
from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse
from gateway.stream import ResponseStream


class Note(Enum):
    """What an instance says of an execution besides its answers."""

    FREED = auto()
    """It takes another execution while this one goes on; the index says nothing."""
    RESCHEDULED = auto()
    """The request is to be executed once more; only iterative sequences can."""


class NotSent(InferenceError):
    """Raised by `execute` when the runtime has none of the requests that are not done.

    Another instance may execute those.
    """


Answer = tuple[int, InferResponse | InferenceError | Note]
"""The index of a request within its execution; a response, the error that ends it, or a note."""


class ModelControl(Protocol):
    """How a model may ask for others to be loaded (the server must be under explicit control)."""

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload; `config` is JSON text or "", `files` go by names like `file:1/a.onnx`.

        Raises InferenceError with Triton's texts.
        """

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload. Raises InferenceError with Triton's texts."""

    def ready(self, name: str, version: str) -> bool:
        """Whether a version is ready ("": the best); InferenceError if it is no number."""

    def decoupled(self, name: str, version: str) -> bool:
        """Whether it answers with any number of responses; InferenceError if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What a backend is given to load one instance.

    `name` is the instance's, `group` the instance group it belongs to, `device` the number of its
    GPU (0 on others). Its threads keep to the `cpu_cores`, if there are any. `path` is the version
    folder, `store` the folder of models that `sluice fetch` has stored.
    `infer` sends a request to another model of this server, `control` loads and unloads others.
    `wasted` is to be told how many tokens a runtime had made for a request after nobody waited
    for it any more.
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
    """What a model's file says of its configuration, for whoever writes one.

    Unlike a completed config it may have tensors whose `data_type` and `dims` are missing, where
    the file does not tell. `notes` says more about tensors, by their names.
    """

    config: ModelConfig
    notes: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of this machine that changes how a runtime serves.

    `fix` says how to remove a limit; it is empty where there is none.
    """

    what: str
    found: str
    fix: str = ""


class Instance(ABC):
    """One loaded, runnable copy of a model.

    `concurrency` is how many executions it takes at once; None means that it batches in flight
    itself and takes every request as it comes. It is `alive` while it can execute: False is for
    ever, and `died` then returns soon. `adapters` are further names that OpenAI's clients
    may put into `model`; `max_model_len` is how many tokens prompt and answer may have together,
    None where nobody counts them.
    """

    concurrency: int | None = 1
    alive: bool = True
    adapters: Sequence[str] = ()
    max_model_len: int | None = None

    @abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        """Answer the requests: in any order, any number of responses each.

        A request is done at its final response or its error, or when the generator ends; raising
        fails every request that is not done, but for NotSent. Closing the generator means stop:
        no reader is left, so abort what can be aborted.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything; called once, after the last execution has ended."""

    def kill(self, reason: str) -> None:  # noqa: B027 - few can do it
        """End at once, if the runtime can: executions fail with it, and `close` returns soon."""

    def left(self, requests: Sequence[InferRequest]) -> None:  # noqa: B027 - few can use it
        """Nobody waits any more for these of an execution, which goes on for others."""

    def waits_for(self, requests: Sequence[InferRequest]) -> Iterable[str]:
        """The models that its executions of these requests wait for; most never call any."""
        return ()

    def stop(self, request: InferRequest) -> bool:
        """Have the model end this request early, and answer it as it likes; False if it cannot.

        May be called more than once, and for a request that is done.
        """
        return False

    async def died(self) -> str:
        """Return why, once the instance can no longer execute; most instances never do.

        Called again after a call was cancelled.
        """
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets was set")

    async def check_ready(self) -> None:
        """Raise InferenceError if the model says that it is not ready; most have no say in it.

        Asked by health checks, also while it executes.
        """
        return

    def metrics(self) -> Iterable[Metric]:
        """The runtime's own metrics at this moment, labelled by the runtime."""
        return ()


class Backend(ABC):
    """One runtime. Created once per process, when the first model asks for it.

    Once created it has imported all that it will need: no two backends are created at the same
    time, but models load side by side, and imports by several threads give modules half made.
    What follows is given before anything else is called. `settings` is what `--backend-config`
    says for it. `kept` is a folder of its own, to keep what is slow to make; it may not exist yet,
    and other gateways share it; None if this user has no place for it. `home` is the folder of a
    Python-based backend: the model.py there serves every model that names this backend; None for
    all others.
    `loads_side_by_side`: the instances of one model may be loaded at the same time.
    `keeps_to_cores`: instances keep to the CPU cores that their contexts name.
    """

    settings: Mapping[str, str] = NO_PARAMETERS
    kept: Path | None = None
    home: Path | None = None
    loads_side_by_side: bool = False
    keeps_to_cores: bool = False

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        """Make what takes long and loading needs, before `complete` is called.

        Cancelled when nobody wants the model any more. InferenceError says why it cannot be made.
        """
        return

    def computes_on_gpus(self) -> bool:
        """Whether the runtime, as it is installed, can; asked only if there is a usable GPU.

        If not, instances whose kind is left to the server are placed on the CPU.
        """
        return True

    def facts(self) -> Sequence[Fact]:
        """Properties of this machine that change how the runtime serves, for `sluice doctor`."""
        return ()

    @abstractmethod
    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Fill in what the model itself says (inputs, outputs, ...); `path`: the version folder.

        Raises InferenceError when the config contradicts the model or the runtime.
        """

    def describe(self, config: ModelConfig, path: Path) -> Description:
        """What `sluice config` writes down; by default whatever `complete` fills in."""
        return Description(self.complete(config, path))

    @abstractmethod
    async def load(self, context: ModelContext) -> Instance:
        """Load one instance, off the event loop; InferenceError says why it cannot be loaded."""
