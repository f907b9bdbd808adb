"""Requests of models to other models, and their loading and unloading (python backend)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from backends.python.codec import (
    MUCH_BYTES,
    TensorWriter,
    describe_error,
    describe_response,
    expected,
    to_json,
    write_in_thread,
)
from backends.python.connection import FrameSocket, WorkerConnection
from backends.python.worker.sluice_worker.protocol import BrokenFrame, ToWorker
from gateway.backend import ModelControl
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream

Infer = Callable[[InferRequest], ResponseStream]
Served = Sequence[int]
"""The numbers of the requests that cause a call; none if they are not known."""

LAST = InferResponse(final=True)
CANCELLED_TEXT = "Request was cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request of a model to another one; `number` is the worker's.

    It is answered over `control`, or over `work` if `over_work` is set.
    """

    number: int
    request: InferRequest
    decoupled: bool
    served: Served
    over_work: bool


@dataclass(frozen=True, slots=True)
class _CallInProgress:
    model: str
    stream: ResponseStream
    served: Served
    task: asyncio.Task[None]


class BusinessLogic:
    """Calls of one worker in progress, a task each.

    `end` cancels them, and `ended` waits for the last one.
    `is_abandoned` tests whether all of some requests are closed and a client has disconnected:
    their calls are cancelled. Each call is answered, and its last answer is marked as final.
    """

    def __init__(
        self,
        link: WorkerConnection,
        infer: Infer,
        control: ModelControl,
        is_abandoned: Callable[[Served], bool],
    ) -> None:
        self._link = link
        self._infer = infer
        self._control = control
        self._is_abandoned = is_abandoned
        self._calls: dict[int, _CallInProgress] = {}

    @property
    def models(self) -> list[str]:
        """The called models that have not finished."""
        return [call.model for call in self._calls.values()]

    def begin(self, call: ModelCall) -> None:
        """Call the other model; its answers are sent to the worker as they arrive.

        ValueError if a call of that number is in progress.
        """
        if call.number in self._calls:
            raise ValueError(f"call {call.number} is in progress")
        try:
            stream = self._submit(call)
        except Exception as error:  # noqa: BLE001 - around one request: the model waits for it
            self._fail(call, error)
            return
        task = asyncio.get_running_loop().create_task(self._run(call, stream))
        self._calls[call.number] = _CallInProgress(call.request.model, stream, call.served, task)
        task.add_done_callback(lambda _: self._calls.pop(call.number))

    def cancel(self, number: int, dropped: bool) -> None:
        """Stop the called model; cancel its request if the call was `dropped`."""
        if (call := self._calls.get(number)) is None:
            return
        if dropped:
            call.stream.cancel()
        else:
            call.stream.stop()

    def cancel_abandoned(self) -> None:
        """A client has disconnected: cancel the calls of abandoned requests."""
        for call in tuple(self._calls.values()):
            if self._is_abandoned(call.served):
                call.stream.cancel()

    def end(self) -> None:
        """Cancel all calls: the worker has ended."""
        for call in tuple(self._calls.values()):
            call.stream.cancel()

    async def ended(self) -> None:
        """Wait until no call is in progress, after `end`."""
        tasks = {each.task for each in self._calls.values()} - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: ModelCall, stream: ResponseStream) -> None:
        try:
            with stream:
                if call.decoupled:
                    await self._pass_all(call, stream)
                else:
                    await self._pass(call, await stream.only(), final=True)
        except Exception as error:  # noqa: BLE001 - around one request: the model waits for it
            self._fail(call, error)

    def _submit(self, call: ModelCall) -> ResponseStream:
        """Raises CANCELLED if its clients have disconnected, INTERNAL for each refusal."""
        if self._is_abandoned(call.served):
            raise InferenceError(Code.CANCELLED, CANCELLED_TEXT)
        request = call.request
        try:
            self._refuse_unsuited(request, decoupled=call.decoupled)
            return self._infer(request)
        except InferenceError as error:
            text = f"Model {request.model} - Error when running inference: {error.message}"
            raise InferenceError(Code.INTERNAL, text) from None

    def _refuse_unsuited(self, request: InferRequest, *, decoupled: bool) -> None:
        name = request.model
        if not self._control.ready(name, request.version):
            raise InferenceError(
                Code.INTERNAL,
                f"Failed for execute the inference request. Model '{name}' is not ready.",
            )
        if not decoupled and self._control.decoupled(name, request.version):
            raise InferenceError(
                Code.INTERNAL,
                f"Model {name} is using the decoupled. The current BLS request call doesn't "
                "support models using the decoupled transaction policy. Please use "
                "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                "models.'",
            )

    async def _pass_all(self, call: ModelCall, stream: ResponseStream) -> None:
        final = False
        async for response in stream:
            final = response.final
            await self._pass(call, response, final=final)
        if stream.cancelled:
            raise InferenceError(Code.CANCELLED, CANCELLED_TEXT)
        if not final:
            await self._pass(call, LAST, final=True)

    async def _pass(self, call: ModelCall, response: InferResponse, *, final: bool) -> None:
        socket = self._socket(call)
        await socket.room()
        tensors = TensorWriter(self._link.outgoing)
        try:
            if sum([len(each.data) for each in response.outputs]) < MUCH_BYTES:
                described = describe_response(response, tensors)
            else:
                described = await write_in_thread(
                    lambda: describe_response(response, tensors), tensors
                )
        except OSError as error:
            tensors.give_back()
            raise InferenceError(
                Code.INTERNAL, f"no memory can be shared with the worker: {error.strerror}"
            ) from None
        socket.send(to_json([ToWorker.INFERRED, call.number, described, final]), tensors.body)

    def _fail(self, call: ModelCall, error: Exception) -> None:
        described = describe_error(expected(error, f"request to model '{call.request.model}'"))
        self._socket(call).send(to_json([ToWorker.INFERRED, call.number, described, True]))

    def _socket(self, call: ModelCall) -> FrameSocket:
        return self._link.work if call.over_work else self._link.control


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
