"""The v2 service over gRPC: one short method per RPC."""

import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

from gateway import metadata
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.errors import rpc_error
from gateway.frontends.grpc.large_messages import LargeMessages
from gateway.frontends.grpc.methods import Parse, ParseLarge
from gateway.frontends.grpc.outbox import Outbox
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import Message, parse_request
from gateway.frontends.grpc.repository import RepositoryServicer
from gateway.frontends.grpc.request import RequestDecoder
from gateway.frontends.grpc.request_memo import Incoming, KnownMessages
from gateway.frontends.grpc.response import Encoder
from gateway.frontends.grpc.rpc import Call, RpcError, Status
from gateway.frontends.grpc.settings import SettingsServicer
from gateway.frontends.grpc.shared_memory import SharedMemoryServicer
from gateway.frontends.grpc.stream_infer import StreamInfer, StrictError
from gateway.frontends.grpc.tracing import begin, follow
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.recordings import Recordings
from gateway.settings import GrpcSettings

log = logging.getLogger("sluice.grpc")

STRICT_MODE = ("triton_grpc_error", "true")


class Servicer(RepositoryServicer, SettingsServicer, SharedMemoryServicer):
    """GRPCInferenceService.

    Methods raise InferenceError or RpcError; what stands before them ends the RPC so. The two that
    infer take parsed messages with their raw contents, and give the bytes of their responses.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        settings: GrpcSettings,
        server_id: str,
        recordings: Recordings | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._recordings = recordings or Recordings()
        self._server_id = server_id
        self._send_timeout_secs = settings.send_timeout_secs
        self._forwarding = HeaderForwarding(settings.header_forward_pattern)
        self._known = KnownMessages()
        self._large = LargeMessages(dataplane)
        self._streams: set[StreamInfer] = set()

    @property
    def parsers(self) -> Mapping[str, Parse]:
        """What makes messages of bytes, for the methods that give bytes."""
        return {"ModelInfer": self._known.parse, "ModelStreamInfer": parse_request}

    def parser_of_large(self, name: str, parse: Parse) -> ParseLarge:
        """What parses the large messages of the method of that name, in a thread if need be."""
        if name == "ModelInfer":
            return self._prepare_unary
        if name == "ModelStreamInfer":
            return self._prepare

        def parse_in_thread(data: bytes, call: Call) -> Awaitable[Any]:
            return self._dataplane.threads.run(parse, data)

        return parse_in_thread

    async def _prepare_unary(self, data: bytes, call: Call) -> Incoming:
        return Incoming(data, None, *await self._prepare(data, call))

    async def _prepare(self, data: bytes, call: Call) -> Message:
        return await self._large.prepare(data, self._decoder(call))

    def stop_reading(self) -> None:
        """Let every open stream finish what it has been asked, and take no more."""
        for stream in self._streams:
            stream.stop_reading()

    async def ServerLive(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=not self._dataplane.exiting)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, call: Call
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._dataplane.check_ready())

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, call: Call
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**metadata.server_metadata(self._server_id))

    async def ModelReady(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        ready = await metadata.check_model_ready(self._dataplane, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, call: Call
    ) -> pb.ModelMetadataResponse:
        found = metadata.model_metadata(self._dataplane, request.name, request.version)
        return pb.ModelMetadataResponse(**found)

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, call: Call
    ) -> pb.ModelConfigResponse:
        model = self._dataplane.model(request.name, request.version)
        return pb.ModelConfigResponse(config=pbtxt.to_message(model.config))

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, call: Call
    ) -> pb.ModelStatisticsResponse:
        rows = metadata.statistics(self._dataplane, request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**row) for row in rows])

    async def ModelInfer(self, incoming: Incoming, call: Call) -> bytes:
        model, infer_request = self._read(incoming, call)
        trace = begin(self._dataplane.tracer, infer_request)
        try:
            with self._dataplane.infer(infer_request, model, trace) as stream:
                if incoming.known is None and not self._forwarding.enabled:
                    self._known.add(incoming, infer_request)
                response = await stream.only()
        finally:
            if trace is not None:
                follow(trace, call)
        return Encoder(infer_request, model, self._dataplane.shared_memory).encode(response)

    async def ModelStreamInfer(self, requests: AsyncIterator[Message], call: Call) -> None:
        outbox = Outbox(call.send, self._send_timeout_secs)
        strict = STRICT_MODE in call.metadata
        stream = StreamInfer(
            self._dataplane,
            self._decoder(call),
            outbox,
            strict=strict,
            recordings=self._recordings,
        )
        self._streams.add(stream)
        try:
            await stream.run(requests)
        except StrictError as error:
            raise rpc_error(error.error) from None
        except TimeoutError:
            log.warning("client stopped reading", extra={"secs": self._send_timeout_secs})
            raise RpcError(Status.CANCELLED, "the client stopped reading") from None
        finally:
            self._streams.discard(stream)

    def _read(self, incoming: Incoming, call: Call) -> tuple[Model, InferRequest]:
        """The model that a message is for, and its request."""
        if (known := incoming.known) is not None:
            model = self._dataplane.model(known.asked.model, known.asked.version)
            _refuse_decoupled(model)
            return model, known.request(incoming.data)
        message: Any = incoming.message
        model = self._dataplane.model(message.model_name, message.model_version)
        _refuse_decoupled(model)
        return model, self._decoder(call).decode(message, incoming.raw, model.config)

    def _decoder(self, call: Call) -> RequestDecoder:
        metadata = call.metadata if self._forwarding.enabled else ()
        return RequestDecoder(self._dataplane.shared_memory, self._forwarding, metadata)


def _refuse_decoupled(model: Model) -> None:
    if model.config.decoupled:
        raise InferenceError(
            Code.UNSUPPORTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )
