"""GRPCInferenceService: one method per RPC of the v2 protocol."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import partial
from typing import Any

from gateway import metadata
from gateway.admission.deadlines import TEXT_TIMES
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, Refusal
from gateway.frontends.grpc.message_memo import InferMessage
from gateway.frontends.grpc.parameters import HeaderForwarding, wants_cancel, wishes_of
from gateway.frontends.grpc.protobuf_wire import Message, parse_head, parse_request
from gateway.frontends.grpc.recorded_streams import resumes
from gateway.frontends.grpc.request import (
    DecodedRequest,
    LargeMessages,
    RequestDecoder,
    address,
)
from gateway.frontends.grpc.rpc import Parse, ParseLarge, RpcCall
from gateway.frontends.grpc.stream_infer import StreamInferRpcs
from gateway.frontends.grpc.unary_infer import UnaryInferRpcs
from gateway.models.model_folder import FILE_PREFIX, VERSIONS, Override, read_versions
from gateway.observability.log import (
    BOOLEANS,
    FILE,
    FORMAT,
    VERBOSE,
    read_log_settings,
    show_log_settings,
)
from gateway.observability.tracer import read_trace_settings, show_trace_settings
from gateway.policy.caller import Caller
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.recordings import Recordings
from gateway.settings import GrpcSettings
from gateway.shared_memory.regions import RegionKind, SharedMemory

CONFIG = "config"
UNLOAD_DEPENDENTS = "unload_dependents"

KINDS = {
    **dict.fromkeys(BOOLEANS, ("bool_param", "boolean")),
    VERBOSE: ("uint32_param", "int32"),
    FORMAT: ("string_param", "string"),
}
"""The variant of each log setting, and its name in Triton's errors."""

VARIANTS = {bool: "bool_param", int: "uint32_param", str: "string_param"}

Parameters = Mapping[str, pb.ModelRepositoryParameter]


class Servicer:
    """Methods of GRPCInferenceService; each raises InferenceError or RpcError.

    ModelInfer and ModelStreamInfer take parsed messages and return or send encoded responses.
    `unary` has the former.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        settings: GrpcSettings,
        server_id: str,
        recordings: Recordings | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._server_id = server_id
        self._forwarding = HeaderForwarding(settings.header_forward_pattern, settings.restrictions)
        self.unary = UnaryInferRpcs(dataplane, self._forwarding)
        self.ModelInfer = self.unary.serve
        self._large = LargeMessages(dataplane)
        self._streams = StreamInferRpcs(
            dataplane, recordings or Recordings(), settings.send_timeout_secs
        )

    @property
    def parsers(self) -> Mapping[str, Parse]:
        """Parsers of the methods that return bytes."""
        return {"ModelInfer": self.unary.parse, "ModelStreamInfer": parse_request}

    def parser_of_large(self, name: str, parse: Parse) -> ParseLarge:
        """The parser of large messages of a method; it runs in a thread if it would block."""
        if name == "ModelInfer":
            return self._prepare_unary
        if name == "ModelStreamInfer":
            return partial(self._prepare, streams=True)

        def parse_in_thread(data: bytes, call: RpcCall) -> Awaitable[Any]:
            return self._dataplane.threads.run(parse, data)

        return parse_in_thread

    async def _prepare_unary(self, data: bytes, call: RpcCall) -> InferMessage:
        return InferMessage(data, None, *await self._prepare(data, call))

    async def _prepare(self, data: bytes, call: RpcCall, *, streams: bool = False) -> Message:
        if self._dataplane.admission is not None:
            refused = _refused_head(self._dataplane, data, call.caller, streams=streams)
            if refused is not None:
                return refused
        return await self._large.prepare(data, self._decoder(call, streams=streams))

    def stop_reading(self) -> None:
        """Refuse further requests on every open stream; the received ones are answered."""
        self._streams.stop_reading()

    async def ServerLive(
        self, request: pb.ServerLiveRequest, call: RpcCall
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=not self._dataplane.exiting)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, call: RpcCall
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._dataplane.check_ready())

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, call: RpcCall
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**metadata.server_metadata(self._server_id))

    async def ModelReady(
        self, request: pb.ModelReadyRequest, call: RpcCall
    ) -> pb.ModelReadyResponse:
        ready = await metadata.check_model_ready(self._dataplane, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, call: RpcCall
    ) -> pb.ModelMetadataResponse:
        found = metadata.model_metadata(self._dataplane, request.name, request.version, call.caller)
        return pb.ModelMetadataResponse(**found)

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, call: RpcCall
    ) -> pb.ModelConfigResponse:
        model = self._dataplane.model(request.name, request.version)
        return pb.ModelConfigResponse(config=pbtxt.to_message(model.config))

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, call: RpcCall
    ) -> pb.ModelStatisticsResponse:
        rows = metadata.statistics(self._dataplane, request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**row) for row in rows])

    def ModelStreamInfer(self, requests: AsyncIterator[Message], call: RpcCall) -> Awaitable[None]:
        return self._streams.serve(requests, self._decoder(call, streams=True), call)

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, call: RpcCall
    ) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        rows = await self._dataplane.index(ready=request.ready)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=row.name, version=row.version, state=row.state, reason=row.reason
                )
                for row in rows
            ]
        )

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, call: RpcCall
    ) -> pb.RepositoryModelLoadResponse:
        _refuse_repository(request.repository_name)
        await self._dataplane.load(request.model_name, _override(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, call: RpcCall
    ) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository(request.repository_name)
        unload_dependents = _unload_dependents(request.parameters)
        versions = _versions(request.parameters)
        await self._dataplane.unload(
            request.model_name, versions, unload_dependents=unload_dependents
        )
        return pb.RepositoryModelUnloadResponse()

    async def LogSettings(
        self, request: pb.LogSettingsRequest, call: RpcCall
    ) -> pb.LogSettingsResponse:
        log = self._dataplane.log
        wanted = {name: _log_value(name, value) for name, value in request.settings.items()}
        log.change(read_log_settings(wanted, _refused_format, log.file_named))
        response = pb.LogSettingsResponse()
        for name, value in show_log_settings(log.settings).items():
            setattr(response.settings[name], VARIANTS[type(value)], value)
        return response

    async def TraceSetting(
        self, request: pb.TraceSettingRequest, call: RpcCall
    ) -> pb.TraceSettingResponse:
        model = request.model_name
        if model:
            model = self._dataplane.model(model).name
        wanted = {name: list(each.value) or None for name, each in request.settings.items()}
        tracer = self._dataplane.tracer
        if wanted:
            tracer.update(model, read_trace_settings(wanted, tracer.file_named))
        response = pb.TraceSettingResponse()
        for name, found in show_trace_settings(tracer.settings(model)).items():
            response.settings[name].value.extend([found] if isinstance(found, str) else found)
        return response

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, call: RpcCall
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions(call).system_status(request.name):
            found = response.regions[region.name]
            found.name, found.key = region.name, region.key
            found.offset, found.byte_size = region.offset, region.byte_size
        return response

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, call: RpcCall
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._regions(call).register_system(
            request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: RpcCall
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions(call).unregister(RegionKind.SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, call: RpcCall
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._regions(call).cuda_status(request.name):
            found = response.regions[region.name]
            found.name, found.device_id = region.name, region.device_id
            found.byte_size = region.byte_size
        return response

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, call: RpcCall
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._regions(call).register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, call: RpcCall
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._regions(call).unregister(RegionKind.CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _regions(self, call: RpcCall) -> SharedMemory:
        return self._dataplane.shared_memory.of(call.caller)

    def _decoder(self, call: RpcCall, *, streams: bool) -> RequestDecoder:
        shared_memory, metadata, rpc = self._dataplane.shared_memory, call.metadata, call.deadline
        wishes = None
        if not TEXT_TIMES.isdisjoint([name for name, _ in metadata]):
            wishes = wishes_of(metadata, rpc, streams=streams)
        return RequestDecoder(shared_memory, self._forwarding, metadata, call.caller, wishes, rpc)


def _override(parameters: Parameters) -> Override | None:
    config, files = None, {}
    for key, value in parameters.items():
        if key == CONFIG:
            _require(value, "string_param", f"load parameter '{key}'")
            config = value.string_param
        elif key.startswith(FILE_PREFIX):
            _require(value, "bytes_param", f"load parameter '{key}'")
            files[key] = value.bytes_param
        elif key != VERSIONS:
            raise InferenceError(Code.INVALID_ARG, f"unrecognized load parameter '{key}'.")
    return Override(config, files, _versions(parameters)) if parameters else None


def _versions(parameters: Parameters) -> frozenset[int]:
    """The versions that a load or an unload names; none if it names none."""
    value = parameters.get(VERSIONS)
    if value is None:
        return frozenset()
    _require(value, "string_param", f"'{VERSIONS}' parameter")
    return read_versions(value.string_param)


def _unload_dependents(parameters: Parameters) -> bool:
    value = parameters.get(UNLOAD_DEPENDENTS)
    if value is None:
        return False
    _require(value, "bool_param", f"'{UNLOAD_DEPENDENTS}' parameter")
    return value.bool_param


def _require(value: pb.ModelRepositoryParameter, kind: str, what: str) -> None:
    if value.WhichOneof("parameter_choice") != kind:
        raise InferenceError(Code.INVALID_ARG, f"invalid value type for {what}, expected {kind}.")


def _refuse_repository(name: str) -> None:
    if name:
        raise InferenceError(Code.UNSUPPORTED, "'repository_name' specification is not supported")


def _log_value(name: str, value: Any) -> Any:
    if name == FILE:
        return value.string_param if value.HasField("string_param") else None
    if name not in KINDS:
        return value
    variant, kind = KINDS[name]
    if value.WhichOneof("parameter_choice") != variant:
        raise InferenceError(Code.INVALID_ARG, f"expect {kind} for '{name}'")
    return getattr(value, variant)


def _refused_format(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"invalid argument for log_format, got: {text}")


def _refused_head(
    dataplane: DataPlane, data: bytes, caller: Caller | None, *, streams: bool
) -> Message | None:
    """A message without inputs, and its refusal, if a limit of its tenant will refuse it.

    None for others, and for messages that cost nothing, or that their method refuses. Raises
    DecodeError for bytes that are not a message.
    """
    head = parse_head(data)
    if head is None or wants_cancel(head) or resumes(head):
        return None
    address(dataplane, head, caller)
    try:
        model = dataplane.model(head.model_name, head.model_version, caller)
        if streams or not model.decoupled:
            dataplane.check_head(caller, model)
    except Refusal as error:
        return head, DecodedRequest(error.again())
    except InferenceError:
        return None  # there is no such model
    return None
