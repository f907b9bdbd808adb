"""ModelInfer: one request, one response."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.admission.admission import Admission
from gateway.admission.deadlines import deadline_of
from gateway.dataplane import BegunRequest, DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.message_memo import InferMessage, MessageMemo
from gateway.frontends.grpc.parameters import HeaderForwarding, keyed, wishes_of
from gateway.frontends.grpc.request import RequestDecoder, address
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.rpc import BegunCall, RpcCall, RpcHead, translated
from gateway.frontends.grpc.status import Metadata, RpcError
from gateway.frontends.grpc.traces import GRPC, begin_trace
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.receipt import SERVER_TIMING, Receipt, receipt_of
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
        trace = self._begin_trace(infer_request, call)
        asked = self._timed(infer_request, call)
        receipt = None if asked.receipt is None else receipt_of(asked)
        try:
            if model.chooser is not None:
                asked = keyed(asked, model.chooser, call)
            with self._dataplane.infer(asked, model, trace) as stream:
                self._learn(incoming, infer_request)
                response = await stream.only()
            return self._encoder(infer_request, stream.model).encode(response)
        finally:
            sending_ns = 0 if trace is None else time.perf_counter_ns()
            trailing = () if receipt is None else timing_metadata(receipt)
            if found := (*self.limits(call), *trailing):
                call.set_trailing_metadata(found)
            if trace is not None or receipt is not None:
                call.on_end(partial(_sent, trace, receipt, sending_ns))

    def begin(self, incoming: InferMessage, call: BegunCall) -> None:
        """Answer a message without a task; raises InferenceError if it is refused."""
        model, infer_request = self._read(incoming, call)
        asked = self._timed(infer_request, call)
        receipt = None if asked.receipt is None else receipt_of(asked)
        try:
            if model.chooser is not None:
                asked = keyed(asked, model.chooser, call)
            trace = self._begin_trace(infer_request, call)
            stream = self._dataplane.infer(asked, model, trace)
        except InferenceError as error:
            if receipt is None:
                raise
            call.fail(translated(error), timing_metadata(receipt))
            receipt.sent()
            return
        encoder = self._encoder(infer_request, stream.model)
        begun = _BegunInfer(stream, self, encoder, call, receipt, trace)
        call.on_disconnect(stream.cancel)
        self._learn(incoming, infer_request)
        stream.listen(begun.look)

    def _begin_trace(self, request: InferRequest, call: RpcCall | BegunCall) -> Trace | None:
        tracer = self._dataplane.tracer
        if not tracer.on:
            return None
        return begin_trace(tracer, request, call.metadata, call.begun_ns or request.received_ns)

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

    def limits(self, call: RpcHead) -> Metadata:
        """The trailing metadata with the limits of a caller, if its client asks for them."""
        admission = self._dataplane.admission
        if admission is None or not wants_limits(admission, call):
            return ()
        return tuple(admission.limit_headers(call.caller).items())

    def _timed(self, request: InferRequest, call: RpcCall | BegunCall) -> InferRequest:
        """The request for the model, with a receipt if its client asks for one."""
        receipts, wished = self._dataplane.receipts, call.wants_timing
        if not (wished or request.parameters or receipts.every):
            return request
        received_ns = request.received_ns
        begun_ns = call.begun_ns or received_ns
        return receipts.begin(request, begun_ns, received_ns, wished=wished)

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

    rpcs: UnaryInferRpcs
    encoder: InferResponseEncoder
    call: BegunCall
    receipt: Receipt | None
    trace: Trace | None

    def encode(self, response: InferResponse) -> bytes | RpcError:
        return self.encoder.encode(response)

    def failed(self, error: Exception) -> bytes | RpcError:
        return translated(error)

    def send(self, answer: bytes | RpcError) -> None:
        receipt, trace = self.receipt, self.trace
        trailing = () if receipt is None else timing_metadata(receipt)
        sending_ns = 0 if trace is None else time.perf_counter_ns()
        if isinstance(answer, RpcError):
            self.call.fail(answer, trailing)
        else:
            if self.call.wants_limits:
                trailing = (*self.rpcs.limits(self.call), *trailing)
            self.call.answer(answer, trailing)
        _sent(trace, receipt, sending_ns)


def wants_limits(admission: Admission, call: RpcHead) -> bool:
    """Whether a client asks for the limits of its caller, which has some."""
    return call.wants_limits and admission.limits(call.caller)


def timing_metadata(receipt: Receipt) -> Metadata:
    """The trailing metadata of an answer with the parts of its receipt up to now."""
    return ((SERVER_TIMING, receipt.header()),)


def _sent(trace: Trace | None, receipt: Receipt | None, sending_ns: int) -> None:
    """Record the end of the RPC, whose answer is sent since then."""
    if trace is not None:
        trace.answer_sent(GRPC, sending_ns)
    if receipt is not None:
        receipt.sent()
