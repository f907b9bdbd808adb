"""Registries over folders that tests write, with a backend that does what they say."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from gateway.backend import Backend, Instance, ModelContext
from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.repository_control import RepositoryControl
from gateway.storage.mirror.mirror import Mirror
from gateway.stream import ResponseStream
from tests.builders import ScriptedInstance

CONFIG = """
backend: "{backend}"
input {{ name: "text_input" data_type: TYPE_STRING dims: 1 }}
output {{ name: "text_output" data_type: TYPE_STRING dims: 1 }}
{more}
"""
ALL_VERSIONS = "version_policy { all { } }"


class ScriptedBackend(Backend):
    """Loads scripted instances; a test says what goes wrong, and holds loads at a gate.

    `instances`, `errors` and `contexts` are by `NAME VERSION`; an error under `NAME VERSION again`
    comes only once an instance has been loaded, one under `complete NAME` before any is.
    """

    def __init__(self) -> None:
        self.instances: dict[str, list[ScriptedInstance]] = {}
        self.contexts: dict[str, list[ModelContext]] = {}
        self.errors: dict[str, Exception] = {}
        self.gate: asyncio.Semaphore | None = None
        self.loading: asyncio.Queue[str] = asyncio.Queue()

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if isinstance(error := self.errors.get(f"complete {config.name}"), Exception):
            raise error
        return config

    async def load(self, context: ModelContext) -> Instance:
        key = f"{context.config.name} {context.path.name}"
        self.loading.put_nowait(key)
        if self.gate is not None:
            await self.gate.acquire()
        loaded = self.instances.setdefault(key, [])
        error = self.errors.get(key if not loaded else f"{key} again")
        if error is not None:
            raise error
        loaded.append(ScriptedInstance())
        self.contexts.setdefault(key, []).append(context)
        return loaded[-1]


class Backends(BackendLoader):
    """The one backend there is."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def of(self, config: ModelConfig) -> Backend:
        """The backend, if that is what the config names."""
        if config.backend != "scripted":
            raise InferenceError(Code.INVALID_ARG, f"unable to find backend '{config.backend}'")
        return self._backend


class Start(Protocol):
    """Runs the control of a folder until the test ends; settings are those of ModelSettings."""

    def stop(self) -> Awaitable[None]:
        """End the registries that run."""

    def __call__(
        self, *repositories: Path | Mirror, settled: bool = True, **settings: Any
    ) -> Awaitable[RepositoryControl]: ...


def write(
    folder: Path,
    name: str,
    *versions: int,
    more: str = "",
    backend: str = "scripted",
    text: str | None = None,
) -> None:
    """Add a model to a repository, with the versions given, or change its configuration."""
    for version in versions:
        (folder / name / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / name).mkdir(exist_ok=True)
    whole = CONFIG.format(backend=backend, more=more) if text is None else text
    (folder / name / "config.pbtxt").write_text(whole)


def no_infer(_: InferRequest) -> ResponseStream:
    """No model calls another."""
    raise AssertionError("a model called another")
