"""Loading and unloading of models by other models (python backend, model management)."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backends.python.codec import expected, to_json
from backends.python.connection import FrameSocket
from backends.python.worker.sluice_worker.protocol import BrokenFrame, ToWorker
from gateway.backend import ModelControl
from gateway.errors import Code, InferenceError


class LoadCycles:
    """Models that are initializing, and the models for which they wait.

    For all models of one server, by their names.
    """

    def __init__(self) -> None:
        self._initializing: Counter[str] = Counter()
        self._waits: list[tuple[str, str]] = []

    @contextmanager
    def of(self, model: str) -> Iterator[None]:
        """Mark a model as initializing within the block."""
        self._initializing[model] += 1
        try:
            yield
        finally:
            self._initializing[model] -= 1

    @contextmanager
    def waiting(self, model: str, other: str) -> Iterator[None]:
        """Mark a model as waiting for the load of another within the block.

        INVALID_ARG if the other would wait for the first.
        """
        if not self._initializing[model]:
            yield
            return
        if self._leads(other, model):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{other}' cannot be loaded before '{model}' has initialized, and this "
                "waits for it",
            )
        self._waits.append((model, other))
        try:
            yield
        finally:
            self._waits.remove((model, other))

    def _leads(self, model: str, to: str) -> bool:
        return model == to or any(self._leads(b, to) for a, b in self._waits if a == model)


def _not_ready() -> InferenceError:
    # A new one each time: an error that is raised again and again keeps every traceback.
    return InferenceError(Code.UNAVAILABLE, "Server not ready")


class ModelManagement:
    """Calls of one worker in progress, a task each.

    `end` cancels them, and `ended` waits for the last one.
    `model` is the calling one.
    """

    def __init__(
        self,
        control_socket: FrameSocket,
        control: ModelControl,
        model: str,
        load_cycles: LoadCycles,
    ) -> None:
        self._socket = control_socket
        self._control = control
        self._model = model
        self._load_cycles = load_cycles
        self._calls: dict[asyncio.Task[None], str] = {}

    @property
    def models(self) -> list[str]:
        """The models that are being loaded or unloaded."""
        return list(self._calls.values())

    def load(self, call: int, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """LOAD_MODEL."""
        self._begin(call, name, self._load(name, config, files))

    def unload(self, call: int, name: str, unload_dependents: bool) -> None:
        """UNLOAD_MODEL."""
        self._begin(call, name, self._control.unload(name, unload_dependents=unload_dependents))

    def ready(self, call: int, name: str, version: str) -> None:
        """MODEL_READY."""
        try:
            self._done(call, None, self._control.ready(name, version))
        except Exception as error:  # noqa: BLE001 - around one call: the model waits for it
            self._fail(call, error)

    def end(self) -> None:
        """Cancel the calls: the worker has ended; loads that have begun continue."""
        for task in self._calls:
            task.cancel()

    async def ended(self) -> None:
        """Wait until no call is in progress, after `end`."""
        # A model may have unloaded itself.
        tasks = self._calls.keys() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        with self._load_cycles.waiting(self._model, name):
            await self._control.load(name, config, files)

    def _begin(self, call: int, name: str, operation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(call, operation))
        self._calls[task] = name
        task.add_done_callback(self._calls.pop)

    async def _run(self, call: int, operation: Coroutine[Any, Any, None]) -> None:
        try:
            await operation
        except Exception as error:  # noqa: BLE001 - around one call: the model waits for it
            self._fail(call, error)
        else:
            self._done(call, None)

    def _fail(self, call: int, error: Exception) -> None:
        self._done(call, expected(error, "the operation").message)

    def _done(self, call: int, error: str | None, value: object = None) -> None:
        self._socket.send(to_json([ToWorker.DONE, call, error, value]))


class NoOtherModels:
    """Model management without a server: every call is UNAVAILABLE."""

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """UNAVAILABLE."""
        raise _not_ready()

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """UNAVAILABLE."""
        raise _not_ready()

    def ready(self, name: str, version: str) -> bool:
        """UNAVAILABLE."""
        raise _not_ready()

    def decoupled(self, name: str, version: str) -> bool:
        """UNAVAILABLE."""
        raise _not_ready()


def read_files(described: list[list[Any]], body: memoryview) -> dict[str, bytes]:
    """Files by their names; BrokenFrame if the body is shorter than their sizes."""
    files, at = {}, 0
    for name, size in described:
        files[name] = bytes(body[at : at + size])
        at += size
    if at > len(body):
        raise BrokenFrame(f"body of {len(body)} bytes, expected {at}")
    return files
