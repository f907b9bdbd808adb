"""Copies of clients' requests: the requests that may be copied, and the parameters of a copy."""

from dataclasses import replace
from mmap import mmap

from gateway.cuda_driver import DeviceMemory
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.rollouts.comparison import MOST_BYTES, byte_size
from gateway.tensor import Tensor


def why_not_copied(request: InferRequest) -> str:
    """The reason why no request of its kind is copied; empty if it may be.

    Clients overwrite shared memory while a copy executes.
    """
    if request.sequence is not None and request.sequence.correlation_id:
        return "of a sequence or a conversation"
    if any(each.region is not None for each in request.outputs):
        return "in shared memory"
    size = 0
    for each in request.inputs:
        if _is_shared(each):
            return "in shared memory"
        size += byte_size(each)
    return "" if size <= MOST_BYTES else f"more than {MOST_BYTES >> 20} MiB"


def copied(request: InferRequest, model: Model) -> InferRequest:
    """The copy for a model: without limits of time, and of the lowest priority."""
    batching = model.config.dynamic_batching
    return replace(
        request,
        version=model.version,
        priority=request.priority if batching is None else batching.priority_levels,
        timeout_us=0,
        received_ns=0,
        trace=None,
        receipt=None,
        checked=None,
        cancellation=None,
        sink=None,
    )


def _is_shared(tensor: Tensor) -> bool:
    data = tensor.data
    return isinstance(data, DeviceMemory) or (
        isinstance(data, memoryview) and isinstance(data.obj, mmap)
    )
