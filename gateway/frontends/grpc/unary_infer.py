"""ModelInfer: one request, one response."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.admission.admission import Admission
from gateway.admission.deadlines import deadline_of
from gateway.dataplane import BegunRequest, DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.message_memo import InferMessage, MessageMemo
from gateway.frontends.grpc.parameters import HeaderForwarding, keyed, wishes_of
from gateway.frontends.grpc.refusals import WANTS_LIMITS
from gateway.frontends.grpc.request import RequestDecoder, address, begin_trace
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.rpc import (
    BegunCall,
    RpcCall,
    RpcError,
    RpcHead,
    translated,
)
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.trace import Trace


class UnaryInferRpcs:
    """The method ModelInfer, in a task or without one."""

    def __init__(self, dataplane: DataPlane, forwarding: HeaderForwarding) -> None:
        self._dataplane = dataplane
        self._forwarding = forwarding
        self._known = MessageMemo()
        self.parse: Callable[[bytes], InferMessage] = self._known.parse
        self.may_begin: Callable[[int], bool] = dataplane.begins_without_task

    async def serve(self, incoming: InferMessage, call: RpcCall) -> bytes:
        """Answer a message; raises InferenceError."""
        model, infer_request = self._read(incoming, call)
        trace = begin_trace(self._dataplane.tracer, infer_request)
        try:
            asked = infer_request
            if model.chooser is not None:
                asked = keyed(infer_request, model.chooser, call)
            with self._dataplane.infer(asked, model, trace) as stream:
                self._learn(incoming, infer_request)
                response = await stream.only()
        finally:
            if trace is not None:
                _trace_sending(trace, call)
            admission = self._dataplane.admission
            if admission is not None and wants_limits(admission, call):
                call.set_trailing_metadata(tuple(admission.limit_headers(call.caller).items()))
        return self._encoder(infer_request, stream.model).encode(response)

    def begin(self, incoming: InferMessage, call: BegunCall) -> None:
        """Answer a message without a task; raises InferenceError if it is refused."""
        model, infer_request = self._read(incoming, call)
        asked = infer_request
        if model.chooser is not None:
            asked = keyed(infer_request, model.chooser, call)
        stream = self._dataplane.infer(asked, model)
        limits = None
        if self._dataplane.admission is not None and wants_limits(self._dataplane.admission, call):
            limits = partial(self._dataplane.limits, call.caller)
        begun = _BegunInfer(stream, self._encoder(infer_request, stream.model), call, limits)
        call.on_disconnect(stream.cancel)
        self._learn(incoming, infer_request)
        stream.listen(begun.look)

    def _read(
        self, incoming: InferMessage, call: RpcCall | BegunCall
    ) -> tuple[Model, InferRequest]:
        """The model and the request of a message."""
        known = incoming.known
        message: Any = incoming.message
        if known is not None:
            model = self._dataplane.model(known.asked.model, known.asked.version, call.caller)
        else:
            address(self._dataplane, message, call.caller)
            model = self._dataplane.model(message.model_name, message.model_version, call.caller)
        if model.decoupled:
            raise InferenceError(
                Code.UNSUPPORTED,
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
            )
        rpc = call.deadline
        wishes = None if call.untimed else wishes_of(call.metadata, rpc)
        if known is not None:
            deadline = rpc if wishes is None else deadline_of(wishes, time.perf_counter_ns())
            return model, known.request(incoming.data, call.caller, deadline)
        metadata = call.metadata if self._forwarding.enabled else ()
        decoder = RequestDecoder(
            self._dataplane.shared_memory, self._forwarding, metadata, call.caller, wishes, rpc
        )
        return model, decoder.decode(message, incoming.raw, model.config)

    def _learn(self, incoming: InferMessage, request: InferRequest) -> None:
        """Add an accepted message to the memo, unless its metadata are a part of the request.

        The meaning of a label may change.
        """
        if incoming.known is not None or self._forwarding.enabled:
            return
        if not request.version or request.version.isdigit():
            self._known.add(incoming, request)

    def _encoder(self, request: InferRequest, model: Model) -> InferResponseEncoder:
        return InferResponseEncoder(request, model, self._dataplane.shared_memory)


@dataclass(slots=True)
class _BegunInfer(BegunRequest[bytes | RpcError]):
    """A request that was begun without a task."""

    encoder: InferResponseEncoder
    call: BegunCall
    limits: Callable[[], Mapping[str, str]] | None

    def encode(self, response: InferResponse) -> bytes | RpcError:
        return self.encoder.encode(response)

    def failed(self, error: Exception) -> bytes | RpcError:
        return translated(error)

    def send(self, answer: bytes | RpcError) -> None:
        if isinstance(answer, RpcError):
            self.call.fail(answer)
        else:
            self.call.answer(answer, () if self.limits is None else tuple(self.limits().items()))


def wants_limits(admission: Admission, call: RpcHead) -> bool:
    """Whether a client asks for the limits of its caller, which has some."""
    return admission.limits(call.caller) and WANTS_LIMITS in call.metadata


def _trace_sending(trace: Trace, call: RpcCall) -> None:
    """Record when sending the response starts and ends."""

    def sent() -> None:
        trace.stamp("GRPC_SEND_END")
        trace.sent()

    trace.stamp("GRPC_SEND_START")
    call.on_end(sent)
