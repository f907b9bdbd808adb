"""Requests of a model to other models, and their loading, unloading and readiness."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

from .connection import Packing
from .errors import TritonModelException
from .protocol import ToGateway
from .response import InferenceResponse
from .tensor import Tensor
from .work import Answered, LifeStage, WorkerState, worker

SERVED: ContextVar[Sequence[Any]] = ContextVar("SERVED", default=())
"""Headers of the requests that this code serves; none in threads of model.py."""


class ResponseIterator:
    """Responses of another model as they arrive; after the last one it starts over."""

    def __init__(self, asked: WorkerState, on_response: Callable[[], None] | None = None) -> None:
        self._worker = asked
        self._arrived: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._ended = False
        self._cancelled = False
        self.number = asked.calls.begin(_put_into(self._arrived, on_response))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._position == len(self._responses):
            self._receive()
        self._position += 1
        return self._responses[self._position - 1]

    def cancel(self) -> None:
        """Ask the model to stop; it decides which responses it still sends."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._worker.connection.send([ToGateway.CANCEL_INFER, self.number, False])

    def drop(self) -> None:
        """Cancel the request: no more responses are read; idempotent."""
        if not self._ended:
            self._ended = True
            self._worker.connection.send_from_finalizer([ToGateway.CANCEL_INFER, self.number, True])

    def _receive(self) -> None:
        if self._ended:
            self._position = 0
            raise StopIteration
        response, final = self._arrived.get()
        self._responses.append(response)
        self._ended = final

    def __del__(self) -> None:
        self.drop()


def ask(header: list[Any], inputs: Sequence[Tensor], decoupled: bool) -> Any:
    """Send a request to another model; returns its response, or an iterator over its responses."""
    asked = _allowed()
    question = _Question(asked, header, inputs, decoupled)
    if decoupled:
        responses = ResponseIterator(asked)
        question.send(responses.number)
        return responses
    arrived: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
    over_work = asked.work.is_read_here
    question.send(asked.calls.begin(_put_into(arrived)), over_work=over_work)
    response, _ = asked.work.wait(arrived) if over_work else arrived.get()
    return response


def ask_soon(header: list[Any], inputs: Sequence[Tensor], decoupled: bool) -> Any:
    """Send a request to another model; a future of the running loop for the result of `ask`.

    It resolves at the first response; for a decoupled call to the iterator.
    """
    asked = _allowed()
    promise = _Promise()
    question = _Question(asked, header, inputs, decoupled)
    if decoupled:
        question.send(_iterate_soon(asked, promise))
        return promise.future
    number = asked.calls.begin(lambda response, _: promise.keep(response))
    promise.on_cancel(lambda: asked.connection.send([ToGateway.CANCEL_INFER, number, True]))
    question.send(number)
    return promise.future


def _iterate_soon(asked: WorkerState, promise: "_Promise") -> int:
    """Begin a call whose iterator resolves the promise at its first response; its number."""
    # `kept` holds the iterator until then; afterwards only its reader does.
    kept: list[ResponseIterator] = []

    def arrived() -> None:
        with suppress(IndexError):  # most responses are not the first
            promise.keep(kept.pop())

    responses = ResponseIterator(asked, arrived)
    kept.append(responses)
    promise.on_cancel(responses.drop)
    return responses.number


class _Promise:
    """A future of the running loop that any thread may resolve."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def keep(self, value: Any) -> None:
        """Resolve it; no effect if the loop is closed, or the future is done."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, value)

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Call once the future is cancelled."""
        self.future.add_done_callback(lambda done: call() if done.cancelled() else None)

    def _settle(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)


def _allowed() -> WorkerState:
    found = worker()
    if found.stage is not LifeStage.SERVING:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return found


def _put_into(
    queue: "SimpleQueue[tuple[InferenceResponse, bool]]",
    then: Callable[[], None] | None = None,
) -> Answered:
    def answered(response: Any, final: bool) -> None:
        queue.put((response, final))
        if then is not None:
            then()

    return answered


class _Question:
    """A packed request to another model; if packing fails, its segments are freed."""

    def __init__(
        self, asked: WorkerState, header: list[Any], inputs: Sequence[Tensor], decoupled: bool
    ) -> None:
        self._connection, self._decoupled = asked.connection, decoupled
        self._packing = Packing(asked.connection)
        try:
            self._request = [*header, [self._packing.tensor(each) for each in inputs]]
        except BaseException:
            self._packing.give_back()
            raise

    def send(self, number: int, *, over_work: bool = False) -> None:
        served = [each[0] for each in SERVED.get()]
        header = [ToGateway.INFER, number, self._request, self._decoupled, served, over_work]
        self._connection.send(header, self._packing.buffers)


def load_model(model_name: str, config: str = "", files: Any = None) -> None:
    """Load or reload a model; TritonModelException if that fails."""
    given = _files(model_name, files)
    sizes = [[name, len(data)] for name, data in given.items()]
    _ask(
        "Failed to load model",
        *(ToGateway.LOAD_MODEL, model_name, config, sizes),
        buffers=list(given.values()),
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model; TritonModelException if that fails."""
    _ask("Failed to unload model", ToGateway.UNLOAD_MODEL, model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version is ready; "" is the version that a request without one gets."""
    asked = (ToGateway.MODEL_READY, model_name, model_version)
    return bool(_ask("Failed to check model readiness", *asked))


def _ask(failure: str, kind: ToGateway, *values: Any, buffers: Any = ()) -> Any:
    asked = worker()
    if asked.stage in (LifeStage.STARTING, LifeStage.COMPLETING, LifeStage.FINALIZING):
        raise TritonModelException(
            f"{failure}: models cannot be asked for in 'auto_complete_config' and 'finalize'."
        )
    try:
        return asked.calls.ask(kind, *values, buffers=buffers)
    except TritonModelException as error:
        raise TritonModelException(f"{failure}: {error}") from None


def _files(model_name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and "
            "file contents"
        )
    for data in files.values():
        if not isinstance(data, bytes):
            kind = type(data).__name__
            raise TypeError(f"Object of type '{kind}' is not an instance of 'bytes'")
    return files
