"""The v2 service over gRPC: one short method per RPC."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway import metadata
from gateway.dataplane import DataPlane
from gateway.errors import UNEXPECTED, Code, InferenceError
from gateway.frontends.grpc import codec
from gateway.frontends.grpc.errors import STATUS
from gateway.frontends.grpc.parsing import UNPARSABLE
from gateway.frontends.grpc.stream_infer import StreamInfer, StrictError
from gateway.messages import InferRequest, InferResponse
from gateway.models import pbtxt
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.protos.grpc_service_pb2_grpc import GRPCInferenceServiceServicer

log = logging.getLogger("sluice.grpc")

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PLAIN_CHARS = 6144
MAX_CHARS = 512
"""grpc may refuse trailers beyond 8 KiB, and percent-encodes what is not printable ASCII: up to
twelve bytes for one character."""

STRICT_MODE = ("triton_grpc_error", "true")


class Servicer(GRPCInferenceServiceServicer):
    """GRPCInferenceService. What this release does not offer answers UNIMPLEMENTED."""

    def __init__(self, dataplane: DataPlane, server_id: str, send_timeout_secs: float) -> None:
        self._dataplane = dataplane
        self._server_id = server_id
        self._send_timeout_secs = send_timeout_secs
        self._streams: set[StreamInfer] = set()

    def stop_reading(self) -> None:
        """Let every open stream finish what it has been asked, and take no more."""
        for stream in self._streams:
            stream.stop_reading()

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=not self._dataplane.exiting)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._dataplane.ready)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**metadata.server_metadata(self._server_id))

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        async with _refusing(context):
            ready = metadata.model_ready(self._dataplane, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        async with _refusing(context):
            found = metadata.model_metadata(self._dataplane, request.name, request.version)
        return pb.ModelMetadataResponse(**found)

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        async with _refusing(context):
            model = self._dataplane.model(request.name, request.version)
        return pb.ModelConfigResponse(config=pbtxt.to_message(model.config))

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        async with _refusing(context):
            rows = metadata.statistics(self._dataplane, request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**row) for row in rows])

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        async with _refusing(context):
            model = self._dataplane.model(request.model_name, request.model_version)
            _refuse_decoupled(model)
            response = await self._single(codec.decode_request(request))
            return codec.encode_response(response, request.model_name, model.version, request.id)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        strict = STRICT_MODE in (context.invocation_metadata() or ())
        stream = StreamInfer(self._dataplane, context.write, self._send_timeout_secs, strict=strict)
        self._streams.add(stream)
        try:
            await stream.run(request_iterator)
        except StrictError as error:
            await _abort(context, error.error)
        except TimeoutError:
            log.warning("client stopped reading", extra={"secs": self._send_timeout_secs})
            await _abort_stalled(context)
        except DecodeError:
            await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)
        finally:
            self._streams.discard(stream)

    async def _not_offered(self, request: Any, context: Context) -> None:
        message = "this release offers no model control, shared memory, trace or log settings"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    RepositoryIndex = RepositoryModelLoad = RepositoryModelUnload = _not_offered
    SystemSharedMemoryStatus = SystemSharedMemoryRegister = _not_offered
    SystemSharedMemoryUnregister = CudaSharedMemoryStatus = _not_offered
    CudaSharedMemoryRegister = CudaSharedMemoryUnregister = _not_offered
    TraceSetting = LogSettings = _not_offered

    async def _single(self, request: InferRequest) -> InferResponse:
        with self._dataplane.infer(request) as stream:
            return await stream.only()


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    """Turn an error inside the block into the RPC's status."""
    try:
        yield
    except InferenceError as error:
        await _abort(context, error)
    except (grpc.aio.AbortError, grpc.aio.BaseError):
        raise
    except Exception:
        # Around one request in a frontend: a defect of ours is logged, and the client learns
        # nothing of it.
        log.exception("request failed unexpectedly")
        await _abort(context, UNEXPECTED)


async def _abort(context: Context, error: InferenceError) -> None:
    """End the RPC with an error; a message longer than trailers can be is cut."""
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    await context.abort(STATUS[error.code], error.message[:limit])


async def _abort_stalled(context: Context) -> None:
    """End the RPC of a client that takes nothing: it gets the status once it reads again."""
    try:
        await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")
    except grpc.aio.InternalError:
        # It has left instead.
        raise asyncio.CancelledError from None


def _refuse_decoupled(model: Model) -> None:
    if model.config.decoupled:
        raise InferenceError(
            Code.UNSUPPORTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )
