"""What is in memory: the loaded versions of every model, and their states."""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.loading import Infer, ModelLoader
from gateway.models.model import Model
from gateway.models.repository import ModelRepository
from gateway.settings import ModelSettings

log = logging.getLogger("sluice.registry")


class State(StrEnum):
    """States of a version (model repository extension)."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Status:
    """Where one version stands; `model` is there while it is READY."""

    state: State
    reason: str = ""
    model: Model | None = None

    @property
    def ready(self) -> bool:
        """Whether it serves requests at this moment."""
        return self.model is not None and self.model.ready

    @property
    def trouble(self) -> str:
        """Why it does not serve requests."""
        return (self.model.trouble if self.model else self.reason) or self.state.value


class ModelRegistry:
    """Loads models, looks them up, drains and closes them. One task runs it."""

    def __init__(self, repository: ModelRepository, settings: ModelSettings) -> None:
        self._repository = repository
        self._settings = settings
        self._versions: dict[str, dict[int, Status]] = {}  # the versions of a model ascend
        self._unreadable: dict[str, str] = {}
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()

    # Looking up.

    @property
    def settled(self) -> bool:
        """Whether every start-up model has been loaded, or has failed."""
        return self._settled.is_set()

    def find(self, name: str, version: str) -> Model:
        """The named version; for "" the highest ready one, or else the highest that is loaded.

        Raises InferenceError with Triton's lookup texts: NOT_FOUND, UNAVAILABLE, INVALID_ARG.
        """
        versions = self._versions.get(name)
        if versions is None:
            raise self._unknown(name)
        if version:
            return _numbered(name, versions, version)
        loaded = [status.model for status in versions.values() if status.model is not None]
        if not loaded:
            raise self._none_loaded(name, versions)
        ready = [model for model in loaded if model.ready]
        return (ready or loaded)[-1]

    def ready_versions(self, name: str) -> list[Model]:
        """The ready versions of a model, lowest first."""
        return [model for model in self.models() if model.name == name and model.ready]

    def models(self) -> Iterator[Model]:
        """Every loaded version, by name and version."""
        for _, versions in sorted(self._versions.items()):
            for status in versions.values():
                if status.model is not None:
                    yield status.model

    def failures(self) -> Mapping[str, str]:
        """Why anything is not ready: `name` or `name version N`, and the reason."""
        versions = {
            f"{name} version {number}": status.trouble
            for name, versions in self._versions.items()
            for number, status in versions.items()
            if not status.ready
        }
        return self._unreadable | versions

    def _unknown(self, name: str) -> InferenceError:
        if name in self._unreadable:
            return _lookup_error(Code.NOT_FOUND, f"'{name}' has no available versions")
        if not self.settled:
            return InferenceError(Code.UNAVAILABLE, "Server not ready")
        return _lookup_error(Code.NOT_FOUND, f"'{name}' is not found")

    def _none_loaded(self, name: str, versions: Mapping[int, Status]) -> InferenceError:
        if any(status.state is State.LOADING for status in versions.values()):
            return _lookup_error(Code.UNAVAILABLE, f"'{name}' is still loading")
        return _lookup_error(Code.NOT_FOUND, f"'{name}' has no available versions")

    # Living.

    async def run(self, infer: Infer) -> None:
        """Load every model of the repository side by side; serve them until cancelled."""
        loader = ModelLoader(BackendLoader(), self._settings.store, infer)
        slots = asyncio.Semaphore(self._settings.load_thread_count)
        try:
            async with asyncio.TaskGroup() as tasks:
                async with asyncio.TaskGroup() as loads:
                    for name in self._repository.names():
                        loads.create_task(self._load(name, loader, slots, tasks))
                _freeze()
                self._settled.set()
                self.notify()
        finally:
            await self._close()

    async def wait_settled(self) -> None:
        """Wait until every start-up model has been loaded, or has failed."""
        await self._settled.wait()

    async def changed(self) -> None:
        """Wait until what is ready may have changed."""
        await self._changed.wait()

    async def drained(self) -> None:
        """Wait until no request is in flight in any model."""
        for model in tuple(self.models()):
            await model.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with an error."""
        for model in self.models():
            model.abandon(error)

    @property
    def in_flight(self) -> int:
        """Requests in flight in all models."""
        return sum(model.in_flight for model in self.models())

    def notify(self) -> None:
        """Wake whoever waits for `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _close(self) -> None:
        for model in self.models():
            await model.close()

    # Loading.

    async def _load(
        self,
        name: str,
        loader: ModelLoader,
        slots: asyncio.Semaphore,
        tasks: asyncio.TaskGroup,
    ) -> None:
        try:
            config = await asyncio.to_thread(self._repository.read, name)
            entry = self._repository.find(name)
            numbers = entry.versions(config.version_policy)
        except InferenceError as error:
            self._unreadable[name] = error.reason
            log.error("model unreadable", extra={"model": name, "reason": error.reason})
            return
        self._versions[name] = {number: Status(State.LOADING) for number in sorted(numbers)}
        for number, status in self._versions[name].items():
            async with slots:
                await self._load_version(config, number, status, loader)
            if status.model is not None:
                tasks.create_task(status.model.run(self.notify))

    async def _load_version(
        self, config: ModelConfig, number: int, status: Status, loader: ModelLoader
    ) -> None:
        extra = {"model": config.name, "version": number}
        log.info("loading model", extra=extra)
        began = time.monotonic()
        try:
            path = self._repository.find(config.name).path / str(number)
            status.model = await loader.load(config, number, path)
            status.state = State.READY
            log.info("model ready", extra=extra | {"secs": round(time.monotonic() - began, 1)})
        except InferenceError as error:
            _mark_failed(status, error, extra)
        except Exception:
            # Around one model load: a runtime's own exception must not take the others along.
            log.exception("model load failed unexpectedly", extra=extra)
            text = "loading failed unexpectedly; the server's log says why"
            _mark_failed(status, InferenceError(Code.INTERNAL, text), extra)


def _mark_failed(status: Status, error: InferenceError, extra: Mapping[str, object]) -> None:
    status.state, status.reason = State.UNAVAILABLE, error.reason
    log.error("model load failed", extra={**extra, "reason": error.reason})


def _freeze() -> None:
    """Take what start-up made out of the garbage collector's rounds."""
    gc.collect()
    gc.freeze()


def _lookup_error(code: Code, text: str) -> InferenceError:
    return InferenceError(code, f"Request for unknown model: {text}")


def _numbered(name: str, versions: Mapping[int, Status], version: str) -> Model:
    status = versions.get(_version_number(version))
    if status is None:
        raise _lookup_error(Code.NOT_FOUND, f"'{name}' version {version} is not found")
    if status.model is None:
        raise _lookup_error(Code.UNAVAILABLE, f"'{name}' version {version} is not at ready state")
    return status.model


def _version_number(version: str) -> int:
    try:
        number = int(version)
    except ValueError:
        number = 2**63
    if number >= 2**63 or not version.removeprefix("-").isdigit():
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to get model version from specified version string '{version}' (details: "
            "stol), version should be an integral value > 0",
        )
    if number < 0:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model version specified '{version}' , version should be an integral value "
            "> 0",
        )
    return number
