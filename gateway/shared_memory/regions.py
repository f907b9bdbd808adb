"""Regions of shared memory that clients register, and the tensors in them."""

from dataclasses import replace
from enum import Enum

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import SharedRegion
from gateway.policy.caller import Caller
from gateway.shared_memory.cuda import CudaRegion, open_cuda
from gateway.shared_memory.system import SystemRegion, open_system
from gateway.tensor import Buffer, Datatype, Tensor

MAX_REGIONS = 512
"""Registered regions: each takes a file descriptor, and sockets need descriptors too."""

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)


Regions = dict[tuple[str, str], SystemRegion | CudaRegion]
"""Regions by tenant and name; the tenant is "" on a server without API keys."""


class RegionKind(Enum):
    """The kinds of region; the value is the word in Triton's messages."""

    SYSTEM = "system"
    CUDA = "CUDA"


class SharedMemory:
    """The registered regions of a tenant; both kinds share one name space.

    Raises InferenceError with Triton's texts (shared memory extension). Unregistering frees the
    name at once; the memory is released when the last request that uses the region has ended.
    `regions` are those of all tenants, by tenant and name.
    """

    def __init__(
        self, *, allowed: bool = False, tenant: str = "", regions: Regions | None = None
    ) -> None:
        self._allowed = allowed
        self._tenant = tenant
        self._regions: Regions = {} if regions is None else regions

    def of(self, caller: Caller | None) -> "SharedMemory":
        """The regions of a caller's tenant."""
        if caller is None or caller.tenant == self._tenant:
            return self
        return SharedMemory(allowed=self._allowed, tenant=caller.tenant, regions=self._regions)

    # Registration.

    def check_new(self, kind: RegionKind, name: str) -> None:
        """Raise InferenceError if a region of that name cannot be registered."""
        if not self._allowed:
            raise InferenceError(Code.UNSUPPORTED, DISABLED)
        if not name:
            raise InferenceError(
                Code.INVALID_ARG,
                f"'region name' is necessary to register {kind.value.lower()} shared memory region",
            )
        if (self._tenant, name) in self._regions:
            raise InferenceError(
                Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager"
            )
        if len(self._regions) >= MAX_REGIONS:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"failed to register shared memory region '{name}': {MAX_REGIONS} regions are "
                "registered, the most this server keeps; unregister some",
            )

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register bytes [offset, offset + byte_size) of a POSIX shared memory object.

        INTERNAL if it does not exist, INVALID_ARG if it is smaller.
        """
        self.check_new(RegionKind.SYSTEM, name)
        self._regions[self._tenant, name] = open_system(name, key, offset, byte_size)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register the memory of a cudaIpcMemHandle_t; INVALID_ARG without a GPU."""
        self.check_new(RegionKind.CUDA, name)
        self._regions[self._tenant, name] = open_cuda(name, raw_handle, device_id, byte_size)

    def unregister(self, kind: RegionKind, name: str = "") -> None:
        """Remove a region, or all of that kind; an unknown name is no error."""
        if not self._allowed:
            raise InferenceError(Code.UNSUPPORTED, DISABLED)
        for region in self._of_kind(kind) if not name else self._named(kind, name):
            del self._regions[self._tenant, region.name]

    def system_status(self, name: str = "") -> list[SystemRegion]:
        """One system region, or all of them; NOT_FOUND for any other name."""
        found = self._status(RegionKind.SYSTEM, name)
        return [region for region in found if isinstance(region, SystemRegion)]

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """One CUDA region, or all of them; NOT_FOUND for any other name."""
        found = self._status(RegionKind.CUDA, name)
        return [region for region in found if isinstance(region, CudaRegion)]

    # Tensors.

    def locate(self, region: SharedRegion) -> SharedRegion:
        """The same part, bound to the region that has the name now.

        NOT_FOUND for an unknown name, INVALID_ARG for a part that exceeds the region.
        """
        found = self._regions.get((self._tenant, region.name))
        if found is None:
            raise InferenceError(
                Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'"
            )
        _check_inside(region, found.byte_size)
        return replace(region, memory=found)

    def read(self, region: SharedRegion, datatype: Datatype | None) -> Buffer | DeviceMemory:
        """The bytes of a part as data of that type; raises as `locate` does.

        Numbers on a GPU stay there. Large parts of system memory are views of the client's memory,
        small ones are copies; all are read-only.
        """
        located = region if region.memory is not None else self.locate(region)
        memory = _memory(located)
        if isinstance(memory, SystemRegion):
            return memory.read(located.offset, located.byte_size)
        part = memory.part(located.offset, located.byte_size)
        return part.read() if datatype is Datatype.BYTES else part

    def write(self, region: SharedRegion, output: Tensor) -> None:
        """Write an output's wire form to the start of a part; INTERNAL if it is too small.

        An output on a GPU may be there already: see `tensor_runtime/instance.py`. Others, such as
        an input that a model returns, are copied: within the GPU, or over the host.
        """
        located = region if region.memory is not None else self.locate(region)
        data = output.data if isinstance(output.data, DeviceMemory) else output.raw()
        size = len(data)
        if size > located.byte_size:
            raise InferenceError(
                Code.INTERNAL,
                f"shared memory size specified with the request for output '{output.name}' "
                f"({located.byte_size} bytes) should be at least {size} bytes to hold the results",
            )
        memory = _memory(located)
        if (
            isinstance(data, DeviceMemory)
            and isinstance(memory, CudaRegion)
            and memory.gpu == data.gpu
        ):
            memory.take(located.offset, data)
        else:
            memory.write(located.offset, output.raw())

    def _of_kind(self, kind: RegionKind) -> list[SystemRegion | CudaRegion]:
        return [
            region
            for (tenant, _), region in sorted(self._regions.items())
            if tenant == self._tenant and _kind(region) is kind
        ]

    def _named(self, kind: RegionKind, name: str) -> list[SystemRegion | CudaRegion]:
        return [region for region in self._of_kind(kind) if region.name == name]

    def _status(self, kind: RegionKind, name: str) -> list[SystemRegion | CudaRegion]:
        if not name:
            return self._of_kind(kind)
        region = self._regions.get((self._tenant, name))
        if region is None:
            raise InferenceError(
                Code.NOT_FOUND,
                f"Unable to find {kind.value.lower()} shared memory region: '{name}'",
            )
        if _kind(region) is not kind:
            raise InferenceError(
                Code.NOT_FOUND,
                f"The region named '{name}' is registered as {_kind(region).value} shared memory, "
                f"not {kind.value} shared memory",
            )
        return [region]


def _kind(region: SystemRegion | CudaRegion) -> RegionKind:
    return RegionKind.SYSTEM if isinstance(region, SystemRegion) else RegionKind.CUDA


def _memory(region: SharedRegion) -> SystemRegion | CudaRegion:
    memory = region.memory
    assert isinstance(memory, SystemRegion | CudaRegion)  # noqa: S101 - only `locate` sets it
    return memory


def _check_inside(region: SharedRegion, size: int) -> None:
    if region.offset < 0 or region.offset > max(size - 1, 0):
        raise InferenceError(
            Code.INVALID_ARG, f"Invalid offset for shared memory region: '{region.name}'"
        )
    if region.byte_size < 0 or region.offset + region.byte_size > size:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Invalid offset + byte size for shared memory region: '{region.name}'",
        )
