"""Outputs that stay on the GPU, in the regions of their request."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from gateway.cuda_driver import DeviceMemory, DeviceRegion
from gateway.messages import InferRequest, SharedRegion
from gateway.tensor import Tensor

NONE: Set[str] = frozenset()


def staying(gpu: int | None, requests: Sequence[InferRequest]) -> Set[str]:
    """The names of the outputs requested in regions on that GPU; `gpu` is None on the host.

    Outputs of a single request are copied within the GPU. Those of a batch are split on the host.
    """
    if gpu is None or len(requests) > 1:
        return NONE
    return {name for name, region in _regions(requests[0]).items() if _is_on(gpu, region)}


def delivered(
    outputs: Mapping[str, Tensor], names: Set[str], request: InferRequest
) -> Mapping[str, Tensor]:
    """The outputs, with the named ones copied into the request's regions; blocks.

    An output that is larger than its region is not copied: encoding the response refuses it.
    """
    regions = _regions(request)
    return {
        name: _placed(tensor, regions[name]) if name in names else tensor
        for name, tensor in outputs.items()
    }


def _regions(request: InferRequest) -> Mapping[str, SharedRegion]:
    return {each.name: each.region for each in request.outputs if each.region and not each.classes}


def _is_on(gpu: int, region: SharedRegion) -> bool:
    return isinstance(region.memory, DeviceRegion) and region.memory.gpu == gpu


def _placed(tensor: Tensor, region: SharedRegion) -> Tensor:
    data, memory = tensor.data, region.memory
    if not isinstance(data, DeviceMemory) or not isinstance(memory, DeviceRegion):
        return tensor  # the runtime may have computed it on the host
    if len(data) > region.byte_size:
        return tensor
    return replace(tensor, data=memory.take(region.offset, data))
