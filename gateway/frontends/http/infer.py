"""The route `infer` of the v2 protocol, in front of the application with all other routes."""

import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.admission.deadlines import TIMES, deadline_of, read_wishes
from gateway.dataplane import BegunRequest, DataPlane
from gateway.frontends.http.body import (
    IDENTITY,
    WINDOW_BITS,
    InferBody,
    answer_encoding,
    compress,
    divide,
    header_length,
    off_loop,
    read_infer_body,
    unknown_encoding,
)
from gateway.frontends.http.connection_parts import LENGTH
from gateway.frontends.http.errors import JSON, plain_error
from gateway.frontends.http.guard import HttpAccess, answer_later, refuse, refused_response
from gateway.frontends.http.head import KEY_HEADER, check_head
from gateway.frontends.http.infer_call import InferCall, InferHead, failure_of
from gateway.frontends.http.infer_request import InferDecoder, OutputForms, Target, decoupled
from gateway.frontends.http.infer_response import (
    Answered,
    InferEncoder,
    WholeAnswer,
    takes_long,
    whole_answer,
)
from gateway.frontends.http.request_scope import (
    BEGUN_NS,
    CALLER,
    CERTIFICATE,
    KNOWN_HEAD,
    OK,
    ORIGIN,
    REPLAYED,
    TRACES,
    WATCH,
    HeaderFilter,
    OnDisconnect,
    RequestState,
    Start,
    begin_trace,
    begun_at,
    caller_in,
    key_of,
    path_address,
    write_whole,
)
from gateway.frontends.http.rollout_keys import keyed
from gateway.frontends.http.timing import SendingApp, timing_header, wishes
from gateway.frontends.http.traces import HTTP, PARENT, trace_of
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.models.request_validation import takes_long as check_takes_long
from gateway.observability.trace import Trace
from gateway.policy.areas import Area
from gateway.policy.pages import BINARY
from gateway.resumption.reader import RecordingReader
from gateway.resumption.recording import RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream
from gateway.threads import LARGE_BYTES

PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
WITH_TASK = frozenset({b"content-encoding", b"transfer-encoding", KEY_HEADER, ORIGIN})
"""The headers of requests whose responses need a task, and of pages, which have conditions."""
FREE = HttpAccess()
AS_REPLAYED = (REPLAYED.lower().encode(), b"true")


class InferRoute:
    """`POST /v2/models/{model}[/versions/{version}]/infer`; all other requests go to `app`.

    It stands before the application's middleware and table of routes, since clients send this
    request thousands of times per second.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        settings: HttpSettings,
        app: ASGIApp,
        recordings: Recordings | None = None,
        access: HttpAccess = FREE,
    ) -> None:
        self._guard = access.guard(Area.INFERENCE)
        self._pages = access.pages(JSON, BINARY)
        self._dataplane = dataplane
        self._recordings = recordings or Recordings()
        self._threads = dataplane.threads
        self._limit = settings.max_input_size
        self._filter = HeaderFilter(settings.header_forward_pattern, settings.restrictions)
        self._app = app
        self._decoder = InferDecoder(dataplane.shared_memory, settings.max_input_size)
        self._encoder = InferEncoder(dataplane.shared_memory)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        found = PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            return self._app(scope, receive, send)
        refusal = None if self._guard is None else self._guard.refusal(scope)
        if refusal is not None:
            return refuse(refusal, scope, receive, send)
        return self._respond(found, scope, receive, send)

    async def _respond(
        self, found: "re.Match[str]", scope: Scope, receive: Receive, send: Send
    ) -> None:
        received_ns = time.perf_counter_ns()
        caller = caller_in(scope)
        model, version = found.groups("")
        address: tuple[str, str] | None = model, version
        if version or "@" in model:
            address = path_address(self._dataplane, model, version, caller=caller)
        answer: ASGIApp
        if address is None:
            answer = plain_error(404, "Not Found")
        elif scope["method"] != "POST":
            answer = plain_error(405, "Method Not Allowed", {"Allow": "POST"})
        else:
            head = self._head(address, scope)
            refusal = self._pages.refusal(scope) if ORIGIN in head.headers else None
            call = InferCall(scope, receive, head, received_ns, caller)
            try:
                answer = refused_response(refusal) if refusal else await self._answer(call)
            except Exception as error:  # noqa: BLE001 - around one request in a frontend
                answer = failure_of(call, error)
            if call.receipt is not None:
                answer = SendingApp(answer, call.receipt)
        await answer(scope, receive, send)

    def begin(self, cycle: RequestResponseCycle, start: Start) -> bool:
        """See `Begin`; for small requests and responses without an encoding."""
        received_ns = time.perf_counter_ns()
        scope: Any = cycle.scope
        receive: Any = cycle.receive
        state: RequestState = scope["state"]
        known: InferHead | None = state.get(KNOWN_HEAD)
        head = known or self._head_without_task(scope)
        if head is None or not self._dataplane.begins_without_task(len(cycle.body)):
            return False
        lasts = (caller := state.get(CALLER)) is None or (caller.valid and caller.expires == inf)
        if self._guard is not None and not (known and lasts and CERTIFICATE not in state):
            if (refusal := self._guard.refusal(scope)) is not None:
                state.pop(KNOWN_HEAD, None)
                answer_later(cycle, start, refusal)
                return True
            caller = state.get(CALLER)
        if known is None and "@" not in scope["path"]:
            state[KNOWN_HEAD] = head  # with "@" a model of the whole name may be loaded later
        call = InferCall(scope, receive, head, received_ns, caller)
        try:
            self._begin(call, cycle, start)
        except Exception as error:  # noqa: BLE001 - around one request in a frontend
            start(failure_of(call, error))
        return True

    def _begin(self, call: InferCall, cycle: RequestResponseCycle, start: Start) -> None:
        model = self._dataplane.model(call.head.model, call.head.version, call.caller)
        if model.decoupled:
            raise decoupled()
        body, cycle.body = cycle.body, bytearray()  # an idle connection keeps no body
        parts = divide(body, header_length(call.head.headers), self._limit)
        request, forms = self._decode(call, model, parts)
        state: RequestState = call.scope["state"]
        if call.head.is_timed or request.parameters:
            begun_ns = state.get(BEGUN_NS, call.received_ns)
            request = self._timed(call, request, begun_ns, call.received_ns)
        tracer, trace = self._dataplane.tracer, None
        if tracer.on:
            begun_ns = state.get(BEGUN_NS, call.received_ns)
            if PARENT in call.head.headers:
                headers = call.scope["headers"]
                trace = trace_of(headers, tracer, request, begun_ns, call.received_ns)
            elif (trace := tracer.begin(request.model)) is not None:
                trace.received(HTTP, begun_ns, call.received_ns)
        if model.chooser is not None and model.chooser.has_keys:
            request = keyed(request, model.chooser, call.scope)
        stream = self._dataplane.infer(request, model, trace)
        begun = _BegunInfer(stream, self, call, cycle, start, request.id, forms, trace)
        state[WATCH](stream.cancel)
        stream.listen(begun.look)

    def _head_without_task(self, scope: Scope) -> InferHead | None:
        """The head of an inference; None if its response needs a task, or for other requests."""
        found = PATH.fullmatch(scope["path"])
        headers = dict(scope["headers"])
        if found is None or scope["method"] != "POST" or not WITH_TASK.isdisjoint(headers):
            return None
        if answer_encoding(headers) != IDENTITY:
            return None
        address = path_address(self._dataplane, *found.groups(""), caller=caller_in(scope))
        return None if address is None else self._head(address, scope)

    def _head(self, address: tuple[str, str], scope: Scope) -> InferHead:
        headers = dict(scope["headers"])
        has_times, wished = not TIMES.isdisjoint(headers), wishes(scope)
        is_timed = self._dataplane.receipts.every or wished
        return InferHead(*address, headers, has_times, is_timed, wished)

    def _timed(
        self, call: InferCall, request: InferRequest, begun_ns: int, whole_ns: int
    ) -> InferRequest:
        receipts, wished = self._dataplane.receipts, call.head.wished
        request = receipts.begin(request, begun_ns, whole_ns, wished=wished)
        call.receipt = request.receipt  # type: ignore[assignment]  # that of `begin`
        return request

    def encode(self, call: InferCall, answered: Answered) -> ASGIApp:
        """The response; if its encoding takes long, an application that encodes it in a thread."""
        if takes_long(answered):
            return partial(self._encode_apart, call, answered)
        answer = whole_answer(self._encoder.encode(*answered))
        if call.receipt is not None:
            self._add_headers(call, answer)
        elif call.caller is not None and (admission := self._dataplane.admission) is not None:
            answer.lines = admission.limit_lines(call.caller)  # likewise, without a call
        return answer

    def _add_headers(self, call: InferCall, answer: WholeAnswer) -> None:
        if (admission := self._dataplane.admission) is not None:
            answer.lines = admission.limit_lines(call.caller)
        if call.receipt is not None:
            answer.headers.append(timing_header(call.receipt))

    async def _encode_apart(
        self, call: InferCall, answered: Answered, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer: ASGIApp
        try:
            answer = await self._encoded(call, answered)
        except Exception as error:  # noqa: BLE001 - around one request in a frontend
            answer = failure_of(call, error)
        await answer(scope, receive, send)

    async def _answer(self, call: InferCall) -> WholeAnswer | Response:
        changes = self._dataplane.changes
        model = self._dataplane.model(call.head.model, call.head.version, call.caller)
        if model.decoupled:
            raise decoupled()
        encoding = call.head.headers.get(b"content-encoding", b"").decode("latin-1")
        if encoding not in WINDOW_BITS and encoding not in ("", IDENTITY):
            return unknown_encoding()
        if self._dataplane.admission is not None:
            check_head(self._dataplane, call.scope, model)
        body = await read_infer_body(
            call.receive, call.head.headers, encoding, self._limit, self._threads
        )
        if changes != self._dataplane.changes:
            # Reading may take long: the model that is ready now gets the request.
            model = self._dataplane.model(call.head.model, call.head.version, call.caller)
        whole_ns = time.perf_counter_ns()
        header, binary = body
        if len(binary) > LARGE_BYTES or (header is not None and len(header) > LARGE_BYTES):
            request, forms = await self._decoded_apart(call, model, body)
        else:
            request, forms = self._decode(call, model, body)
        if call.head.is_timed or request.parameters:
            request = self._timed(call, request, begun_at(call.scope, request), whole_ns)
        if KEY_HEADER in call.head.headers:
            submit = partial(self._submit, call, model, request, whole_ns)
            asked = await self._recorded(call, model, request, body)
            reader = await self._recordings.open_anywhere(asked, submit)
            return await self._answer_once(call, reader, forms)
        stream = self._submit(call, model, request, whole_ns)
        with stream, OnDisconnect(call.scope, stream.cancel):
            response = await stream.only()
        return await self._encoded(call, Answered(stream.model, request.id, response, forms))

    def _submit(
        self, call: InferCall, model: Model, request: InferRequest, whole_ns: int
    ) -> ResponseStream:
        trace = None
        if TRACES in call.scope:
            trace = begin_trace(call.scope, self._dataplane.tracer, request, whole_ns)
        if model.chooser is not None:
            request = keyed(request, model.chooser, call.scope)
        return self._dataplane.infer(request, model, trace)

    async def _answer_once(
        self, call: InferCall, reader: RecordingReader, forms: OutputForms
    ) -> WholeAnswer:
        with reader, OnDisconnect(call.scope, reader.cancel):
            response = await reader.only()
        asked = reader.recorded
        answered = Answered(asked.model, asked.request.id, response, forms)
        answer = await self._encoded(call, answered)
        if reader.replayed:
            answer.headers.append(AS_REPLAYED)
        return answer

    async def _encoded(self, call: InferCall, answered: Answered) -> WholeAnswer:
        if takes_long(answered):
            encoded = await self._threads.run(self._encoder.encode, *answered)
        else:
            encoded = self._encoder.encode(*answered)
        answer = whole_answer(encoded)
        encoding = answer_encoding(call.head.headers)
        if encoding != IDENTITY:
            compressed = await compress(encoding, answer.parts, self._threads)
            answer.parts = [compressed]
            answer.headers[-1] = (LENGTH, b"%d" % len(compressed))
            answer.headers.append((b"content-encoding", encoding.encode()))
        self._add_headers(call, answer)
        return answer

    async def _recorded(
        self, call: InferCall, model: Model, request: InferRequest, body: InferBody
    ) -> RecordedRequest:
        """The request with its idempotency key."""
        header, binary = body
        length = b"" if header is None else b"%d" % len(header)
        parts = length, header or b"", binary
        if sum(map(len, parts)) > LARGE_BYTES:
            key = await off_loop(self._threads, call.scope, key_of, call.scope, *parts)
        else:
            key = key_of(call.scope, *parts)
        return RecordedRequest(call.scope["path"], model, request, key)

    async def _decoded_apart(
        self, call: InferCall, model: Model, body: InferBody
    ) -> tuple[InferRequest, OutputForms]:
        """A large request; decoded, or only checked, in a thread if that takes long."""
        header, _ = body
        if header is not None and len(header) > LARGE_BYTES:
            return await off_loop(
                self._threads, call.scope, self._decode_checked, call, model, body
            )
        request, forms = self._decode(call, model, body)
        if check_takes_long(request):
            request = await off_loop(self._threads, call.scope, model.checked, request)
        return request, forms

    def _decode_checked(
        self, call: InferCall, model: Model, body: InferBody
    ) -> tuple[InferRequest, OutputForms]:
        request, forms = self._decode(call, model, body)
        return model.checked(request), forms

    def _decode(
        self, call: InferCall, model: Model, body: InferBody
    ) -> tuple[InferRequest, OutputForms]:
        forwarded = self._filter.of(call.scope) if self._filter.on else ()
        target = Target(model.config, call.head.version, forwarded, call.received_ns, call.caller)
        if call.head.has_times and (found := read_wishes(call.scope["headers"])) is not None:
            target = target._replace(deadline=deadline_of(found, call.received_ns))
        header, binary = body
        if header is None:
            return self._decoder.decode_raw(target, binary)
        return self._decoder.decode(target, header, binary)


@dataclass(slots=True)
class _BegunInfer(BegunRequest[ASGIApp]):
    """A request that was begun without a task."""

    route: InferRoute
    call: InferCall
    cycle: RequestResponseCycle
    start: Start
    request_id: str
    forms: OutputForms
    trace: Trace | None

    def encode(self, response: InferResponse) -> ASGIApp:
        answered = Answered(self.stream.model, self.request_id, response, self.forms)
        return self.route.encode(self.call, answered)

    def failed(self, error: Exception) -> ASGIApp:
        return failure_of(self.call, error)

    def send(self, answer: ASGIApp) -> None:
        cycle, receipt, trace = self.cycle, self.call.receipt, self.trace
        cycle.scope["state"][WATCH](None)
        sending_ns = 0 if trace is None else time.perf_counter_ns()
        is_whole = isinstance(answer, WholeAnswer) and not cycle.flow.write_paused
        has_task = not (cycle.disconnected or is_whole)
        if has_task:
            self.start(answer if receipt is None else SendingApp(answer, receipt))
        elif isinstance(answer, WholeAnswer) and not cycle.disconnected:
            write_whole(cycle, answer.headers, answer.parts, OK, answer.lines)
        if trace is not None:
            trace.answer_sent(HTTP, sending_ns)
        if receipt is not None and not has_task:
            receipt.sent()
