"""The shared memory RPCs: status, register, unregister (protocol 12)."""

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.rpc import Call
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import RegionKind


class SharedMemoryServicer:
    """The part of GRPCInferenceService that knows regions; raises InferenceError."""

    _dataplane: DataPlane

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._dataplane.shared_memory.system_status(request.name):
            found = response.regions[region.name]
            found.name, found.key = region.name, region.key
            found.offset, found.byte_size = region.offset, region.byte_size
        return response

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, call: Call
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._dataplane.shared_memory.register_system(
            request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._dataplane.shared_memory.unregister(RegionKind.SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, call: Call
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._dataplane.shared_memory.cuda_status(request.name):
            found = response.regions[region.name]
            found.name, found.device_id = region.name, region.device_id
            found.byte_size = region.byte_size
        return response

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, call: Call
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._dataplane.shared_memory.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, call: Call
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._dataplane.shared_memory.unregister(RegionKind.CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()
