"""The shared memory RPCs: status, register, unregister (protocol 12)."""

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.errors import Context
from gateway.protos import grpc_service_pb2 as pb
from gateway.protos.grpc_service_pb2_grpc import GRPCInferenceServiceServicer
from gateway.shared_memory.regions import Kind


class SharedMemoryServicer(GRPCInferenceServiceServicer):
    """The part of GRPCInferenceService that knows regions; raises InferenceError."""

    _dataplane: DataPlane

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._dataplane.shared_memory.system_status(request.name):
            found = response.regions[region.name]
            found.name, found.key = region.name, region.key
            found.offset, found.byte_size = region.offset, region.byte_size
        return response

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._dataplane.shared_memory.register_system(
            request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._dataplane.shared_memory.unregister(Kind.SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._dataplane.shared_memory.cuda_status(request.name):
            found = response.regions[region.name]
            found.name, found.device_id = region.name, region.device_id
            found.byte_size = region.byte_size
        return response

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._dataplane.shared_memory.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._dataplane.shared_memory.unregister(Kind.CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()
