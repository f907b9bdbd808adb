"""The port of a router for the other routers of its fleet, and the answers to their calls."""

import time
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.accepting import AcceptedLink, AcceptingPort
from gateway.fleet.cancellations import decode_name
from gateway.fleet.handshake import FleetKind, FleetRole
from gateway.fleet.large import sendable
from gateway.fleet.relays import Relay, Relayed, decode_relay, encode
from gateway.fleet.router import Router
from gateway.fleet.traces import begin_trace, end_trace
from gateway.messages import InferRequest, InferResponse
from gateway.observability.trace import Trace
from gateway.processes.channel import Channel, Frame
from gateway.processes.error_messages import write_error
from gateway.processes.inference_calls import AnsweringEnd, InferenceKind
from gateway.processes.inference_messages import write_request
from gateway.request_name import RequestName
from gateway.resumption.reader import EventId, RecordingReader
from gateway.resumption.recording import Key, KeyReused, RecordedRequest
from gateway.server import Listeners, Server
from gateway.settings import FleetSettings
from gateway.stream import ResponseStream


class RelayAnswer(AnsweringEnd):
    """The answer to a call of another router: a recording here, and its responses."""

    def __init__(self, port: "RelayPort", channel: Channel, call: int, relay: Relay) -> None:
        super().__init__(channel, call, relay.request)
        self._port = port
        self._relay = relay
        self._reader: RecordingReader | None = None
        self._trace: Trace | None = None

    async def respond(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The responses of the recording.

        None, and no answer, if this router drains or does not have the model: then the next router
        has the key.
        """
        try:
            reader = None if self._port.dataplane.exiting else self._opened(request)
        except KeyReused:
            self._send(Relayed("", "", b"", reused=True))
            return
        if reader is None:
            return
        self._reader, recorded = reader, reader.recorded
        with reader:
            message = write_request(recorded.request)
            self._send(Relayed(reader.token, recorded.model.version, message, reader.replayed))
            try:
                while batch := await reader.batch():
                    for each in batch:
                        yield each
            finally:
                end_trace(self._trace)

    def _opened(self, request: InferRequest) -> RecordingReader | None:
        relay, recordings, dataplane = self._relay, self._port.recordings, self._port.dataplane
        if relay.token:
            event = EventId(relay.token, relay.after)
            return recordings.resume(event, relay.place, request.caller)
        key, received_ns = Key(relay.key, relay.fingerprint), time.perf_counter_ns()
        joined = recordings.join(key, request.caller)
        if joined is not None:
            return joined
        try:
            model = dataplane.model(request.model, request.version)
        except InferenceError:
            return None

        def submit() -> ResponseStream:
            self._trace = begin_trace(dataplane.tracer, request, received_ns)
            return dataplane.infer(request, model, self._trace)

        return recordings.open(RecordedRequest(relay.place, model, request, key), submit)

    def _send(self, answer: Relayed) -> None:
        self._channel.send(FleetKind.RELAYED, self._call, sendable(encode(answer)))

    def _send_data(self, payload: bytes, kind: int = InferenceKind.DATA) -> None:
        super()._send_data(sendable(payload), kind)

    def _take(self, frame: Frame) -> None:
        if frame.kind != FleetKind.INTERRUPT:
            super()._take(frame)
        elif self._reader is not None:
            self._reader.interrupt()


class RelayLink(AcceptedLink):
    """The connection of another router, and the answers to its calls that are under way."""

    def __init__(self, port: "RelayPort") -> None:
        super().__init__(port)
        self._port = port
        self._answers: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return not self._answers

    def begin(self) -> None:
        """Nothing: the other router calls."""

    def hear(self, frame: Frame) -> None:
        try:
            if frame.kind == FleetKind.RELAY:
                self._relay(frame.call, decode_relay(frame.payload))
            elif frame.kind == FleetKind.CANCEL:
                self._cancel(frame.call, decode_name(frame.payload))
        except msgspec.DecodeError as error:
            text = f"the call of another router cannot be read: {error}"
            refusal = write_error(InferenceError(Code.INVALID_ARG, text))
            self.channel.send(InferenceKind.REFUSED, frame.call, refusal)

    def _relay(self, call: int, relay: Relay) -> None:
        answer = RelayAnswer(self._port, self.channel, call, relay)
        self._answers.add(call)
        answer.task = self._port.tasks.create_task(answer.run(answer.respond))
        answer.task.add_done_callback(partial(self._ended, call))

    def _cancel(self, call: int, name: RequestName) -> None:
        found = True
        try:
            self._port.dataplane.running.cancel(name)
        except InferenceError:
            found = False
        self.channel.send(FleetKind.CANCELLED, call, encode(found))

    def _ended(self, call: int, _: object) -> None:
        self.channel.leave(call)
        self._answers.discard(call)
        self.finish_if_idle()


class RelayPort(AcceptingPort[RelayLink]):
    """The port of a router for the other routers of its fleet.

    It lets the recordings and the requests of this server know those of the others.
    """

    def __init__(self, server: Server, inner: Listeners, settings: FleetSettings) -> None:
        router = server.dataplane.fleet
        assert isinstance(router, Router)  # noqa: S101 - as the settings say
        super().__init__(router.identity.at(FleetRole.CALLED), inner, settings)
        self._router = router
        self.dataplane = server.dataplane
        self.recordings = server.recordings
        self.recordings.elsewhere = router.relays
        self.dataplane.running.elsewhere = router.relays.cancel

    async def bind(self) -> None:
        await super().bind()
        self._router.identity.port = self.ports["fleet"]

    def new_link(self) -> RelayLink:
        return RelayLink(self)
