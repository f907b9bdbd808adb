"""A model calls other models of this server (python backend, business logic scripting)."""

import asyncio
from collections.abc import Callable

from backends.python.link import Link
from backends.python.requests import to_json
from backends.python.responses import describe_response
from backends.python.tensors import TensorWriter
from backends.python.worker.sluice_worker.messages import ToWorker
from gateway.backend import ModelControl
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream

Infer = Callable[[InferRequest], ResponseStream]

LAST = InferResponse(final=True)


class BusinessLogic:
    """The calls of one worker that are under way, a task each; `end` cancels them."""

    def __init__(self, link: Link, infer: Infer, control: ModelControl) -> None:
        self._link = link
        self._infer = infer
        self._control = control
        self._calls: dict[int, asyncio.Task[None]] = {}

    def begin(self, call: int, request: InferRequest, *, decoupled: bool) -> None:
        """Ask the other model; its answers go to the worker as they come."""
        task = asyncio.get_running_loop().create_task(self._run(call, request, decoupled))
        self._calls[call] = task
        task.add_done_callback(lambda _: self._calls.pop(call))

    def cancel(self, call: int) -> None:
        """The model wants no more answers to that call."""
        if (task := self._calls.get(call)) is not None:
            task.cancel()

    def end(self) -> None:
        """Nobody waits for any answer any more."""
        for task in tuple(self._calls.values()):
            task.cancel()

    async def _run(self, call: int, request: InferRequest, decoupled: bool) -> None:
        try:
            with self._submit(request, decoupled=decoupled) as stream:
                if decoupled:
                    await self._pass_all(call, stream)
                else:
                    self._pass(call, await stream.only(), final=True)
        except InferenceError as error:
            self._fail(call, error.message)

    def _submit(self, request: InferRequest, *, decoupled: bool) -> ResponseStream:
        try:
            self._refuse_unsuited(request, decoupled=decoupled)
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

    async def _pass_all(self, call: int, stream: ResponseStream) -> None:
        final = False
        async for response in stream:
            final = response.final
            self._pass(call, response, final=final)
            await self._link.control.room()
        if not final:
            self._pass(call, LAST, final=True)

    def _pass(self, call: int, response: InferResponse, *, final: bool) -> None:
        tensors = TensorWriter(self._link.outgoing)
        try:
            described = describe_response(response, tensors)
        except OSError as error:
            tensors.give_back()
            raise InferenceError(
                Code.INTERNAL, f"no memory can be shared with the worker: {error.strerror}"
            ) from None
        header = to_json([ToWorker.INFERRED, call, described, final])
        self._link.control.send(header, tensors.body)

    def _fail(self, call: int, message: str) -> None:
        # As on Triton every failure of another model is INTERNAL to the one that asked.
        described = [[], [Code.INTERNAL.name, message], {}]
        self._link.control.send(to_json([ToWorker.INFERRED, call, described, True]))
