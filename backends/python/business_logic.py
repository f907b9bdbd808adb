"""A model calls other models of this server (python backend, business logic scripting)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.python.channel import Channel
from backends.python.link import Link
from backends.python.requests import to_json
from backends.python.responses import describe_response
from backends.python.tensors import MUCH_BYTES, TensorWriter, beside
from backends.python.worker.sluice_worker.messages import ToWorker
from gateway.backend import ModelControl
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream

Infer = Callable[[InferRequest], ResponseStream]
Served = Sequence[int]
"""The requests on whose behalf a call is made, by their numbers; none if that is not known."""

LAST = InferResponse(final=True)
NOBODY_WAITS = "Request was cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a model asks of another one; `number` is the worker's.

    It is answered over `control`, or if it says so over `work`.
    """

    number: int
    request: InferRequest
    decoupled: bool
    served: Served
    over_work: bool


@dataclass(frozen=True, slots=True)
class _UnderWay:
    stream: ResponseStream
    served: Served
    task: asyncio.Task[None]


class BusinessLogic:
    """The calls of one worker that are under way, a task each; `end` cancels them.

    `is_left` says whether nobody waits any more for any of some requests: what is asked on their
    behalf is cancelled. Each call is answered, and the last answer says that it is.
    """

    def __init__(
        self,
        link: Link,
        infer: Infer,
        control: ModelControl,
        is_left: Callable[[Served], bool],
    ) -> None:
        self._link = link
        self._infer = infer
        self._control = control
        self._is_left = is_left
        self._calls: dict[int, _UnderWay] = {}

    def begin(self, call: Call) -> None:
        """Ask the other model; its answers go to the worker as they come.

        ValueError if a call of that number is under way.
        """
        if call.number in self._calls:
            raise ValueError(f"call {call.number} is under way")
        if self._is_left(call.served):
            self._fail(call, NOBODY_WAITS)
            return
        try:
            stream = self._submit(call.request, decoupled=call.decoupled)
        except InferenceError as error:
            self._fail(call, error.message)
            return
        task = asyncio.get_running_loop().create_task(self._run(call, stream))
        self._calls[call.number] = _UnderWay(stream, call.served, task)
        task.add_done_callback(lambda _: self._calls.pop(call.number))

    def cancel(self, number: int) -> None:
        """The model wants no more answers to that call."""
        if (call := self._calls.get(number)) is not None:
            call.stream.cancel()

    def cancel_left(self) -> None:
        """Somebody has left: cancel what is asked on behalf of nobody any more."""
        for call in tuple(self._calls.values()):
            if self._is_left(call.served):
                call.stream.cancel()

    def end(self) -> None:
        """Nobody waits for any answer any more."""
        for call in tuple(self._calls.values()):
            call.stream.cancel()

    async def _run(self, call: Call, stream: ResponseStream) -> None:
        try:
            with stream:
                if call.decoupled:
                    await self._pass_all(call, stream)
                else:
                    await self._pass(call, await stream.only(), final=True)
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

    async def _pass_all(self, call: Call, stream: ResponseStream) -> None:
        final = False
        async for response in stream:
            final = response.final
            await self._pass(call, response, final=final)
        if stream.cancelled:
            raise InferenceError(Code.CANCELLED, NOBODY_WAITS)
        if not final:
            await self._pass(call, LAST, final=True)

    async def _pass(self, call: Call, response: InferResponse, *, final: bool) -> None:
        channel = self._channel(call)
        await channel.room()
        tensors = TensorWriter(self._link.outgoing)
        try:
            if sum([len(each.data) for each in response.outputs]) < MUCH_BYTES:
                described = describe_response(response, tensors)
            else:
                described = await beside(lambda: describe_response(response, tensors), tensors)
        except OSError as error:
            tensors.give_back()
            raise InferenceError(
                Code.INTERNAL, f"no memory can be shared with the worker: {error.strerror}"
            ) from None
        channel.send(to_json([ToWorker.INFERRED, call.number, described, final]), tensors.body)

    def _fail(self, call: Call, message: str) -> None:
        # As on Triton every failure of another model is INTERNAL to the one that asked.
        described = [[], [Code.INTERNAL.name, message], {}]
        self._channel(call).send(to_json([ToWorker.INFERRED, call.number, described, True]))

    def _channel(self, call: Call) -> Channel:
        return self._link.work if call.over_work else self._link.control
