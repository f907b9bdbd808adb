"""The model repository RPCs: index, load, unload (protocol 11 and 18.2)."""

from collections.abc import Mapping

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.rpc import Call
from gateway.models.upload import FILE_PREFIX, Override
from gateway.protos import grpc_service_pb2 as pb

CONFIG = "config"
UNLOAD_DEPENDENTS = "unload_dependents"


class RepositoryServicer:
    """The part of GRPCInferenceService that controls models; raises InferenceError."""

    _dataplane: DataPlane

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, call: Call
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
        self, request: pb.RepositoryModelLoadRequest, call: Call
    ) -> pb.RepositoryModelLoadResponse:
        _refuse_repository(request.repository_name)
        await self._dataplane.load(request.model_name, _override(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, call: Call
    ) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository(request.repository_name)
        unload_dependents = _unload_dependents(request.parameters)
        await self._dataplane.unload(request.model_name, unload_dependents=unload_dependents)
        return pb.RepositoryModelUnloadResponse()


Parameters = Mapping[str, pb.ModelRepositoryParameter]


def _override(parameters: Parameters) -> Override | None:
    config, files = None, {}
    for key, value in parameters.items():
        if key == CONFIG:
            _require(value, "string_param", f"load parameter '{key}'")
            config = value.string_param
        elif key.startswith(FILE_PREFIX):
            _require(value, "bytes_param", f"load parameter '{key}'")
            files[key] = value.bytes_param
        else:
            raise InferenceError(Code.INVALID_ARG, f"unrecognized load parameter '{key}'.")
    return Override(config, files) if parameters else None


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
