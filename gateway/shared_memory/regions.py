"""Which shared memory have clients registered, and where do a request's tensors lie in it?"""

from dataclasses import replace
from enum import Enum

from gateway.device_memory import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import SharedRegion
from gateway.shared_memory.cuda import CudaRegion, open_cuda
from gateway.shared_memory.system import SystemRegion, open_system
from gateway.tensor import Buffer, Datatype, Tensor

MAX_REGIONS = 512
"""Regions at once: each costs the process a file, and those of sockets must not run out."""

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)


class RegionKind(Enum):
    """The kinds of region; the value is how Triton's messages call it."""

    SYSTEM = "system"
    CUDA = "CUDA"


class SharedMemory:
    """The regions that clients have registered; both kinds share one name space.

    Raises InferenceError with Triton's texts (protocol: shared memory). A region that is
    unregistered loses its name at once; its memory stays until the last request that has located
    a part of it, or holds a view of it, has ended.
    """

    def __init__(self, *, allowed: bool = False) -> None:
        self._allowed = allowed
        self._regions: dict[str, SystemRegion | CudaRegion] = {}

    # For whoever registers.

    def check_new(self, kind: RegionKind, name: str) -> None:
        """Raise InferenceError if no region can be registered, or none of that name."""
        if not self._allowed:
            raise InferenceError(Code.UNSUPPORTED, DISABLED)
        if not name:
            raise InferenceError(
                Code.INVALID_ARG,
                f"'region name' is necessary to register {kind.value.lower()} shared memory region",
            )
        if name in self._regions:
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

        INTERNAL if it does not exist, INVALID_ARG if it is smaller than that.
        """
        self.check_new(RegionKind.SYSTEM, name)
        self._regions[name] = open_system(name, key, offset, byte_size)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register the memory behind a cudaIpcMemHandle_t; INVALID_ARG without a GPU."""
        self.check_new(RegionKind.CUDA, name)
        self._regions[name] = open_cuda(name, raw_handle, device_id, byte_size)

    def unregister(self, kind: RegionKind, name: str = "") -> None:
        """Forget a region, or all of that kind; one that is not registered is no error."""
        if not self._allowed:
            raise InferenceError(Code.UNSUPPORTED, DISABLED)
        for region in self._of_kind(kind) if not name else self._named(kind, name):
            del self._regions[region.name]

    def system_status(self, name: str = "") -> list[SystemRegion]:
        """That system region, or all of them; NOT_FOUND if it is none."""
        found = self._status(RegionKind.SYSTEM, name)
        return [region for region in found if isinstance(region, SystemRegion)]

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """That CUDA region, or all of them; NOT_FOUND if it is none."""
        found = self._status(RegionKind.CUDA, name)
        return [region for region in found if isinstance(region, CudaRegion)]

    # For whoever reads and writes tensors.

    def locate(self, region: SharedRegion) -> SharedRegion:
        """The same part, tied to the region that has the name now, whatever becomes of the name.

        NOT_FOUND for an unknown name, INVALID_ARG for a part that is not inside the region.
        """
        found = self._regions.get(region.name)
        if found is None:
            raise InferenceError(
                Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'"
            )
        _check_inside(region, found.byte_size)
        return replace(region, memory=found)

    def read(self, region: SharedRegion, datatype: Datatype | None) -> Buffer | DeviceMemory:
        """The bytes of a part as data of that type; see `locate` for what is refused.

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
        """Put an output's wire form at the beginning of a part; INTERNAL if it is too small.

        What a runtime has left on a GPU is there already: see `tensor_runtime/device_outputs.py`.
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
        if not isinstance(data, DeviceMemory):
            _memory(located).write(located.offset, data)

    def _of_kind(self, kind: RegionKind) -> list[SystemRegion | CudaRegion]:
        return [region for _, region in sorted(self._regions.items()) if _kind(region) is kind]

    def _named(self, kind: RegionKind, name: str) -> list[SystemRegion | CudaRegion]:
        return [region for region in self._of_kind(kind) if region.name == name]

    def _status(self, kind: RegionKind, name: str) -> list[SystemRegion | CudaRegion]:
        if not name:
            return self._of_kind(kind)
        region = self._regions.get(name)
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
