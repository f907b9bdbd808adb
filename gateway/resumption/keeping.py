"""What does it take to keep a response for a while?"""

from dataclasses import replace

from gateway.messages import InferResponse
from gateway.tensor import Tensor

RESPONSE_BYTES = 512
TENSOR_BYTES = 256
PARAMETER_BYTES = 128
ELEMENT_BYTES = 40
"""What Python's objects take beside the data they hold."""


def kept_bytes(response: InferResponse) -> int:
    """The memory that a kept response takes, objects included."""
    tensors = sum(TENSOR_BYTES + _data_bytes(each) for each in response.outputs)
    texts = sum(len(each) for each in response.parameters.values() if isinstance(each, str))
    if response.error is not None:
        texts += len(response.error.message)
    return RESPONSE_BYTES + tensors + PARAMETER_BYTES * len(response.parameters) + texts


def owned(response: InferResponse) -> InferResponse:
    """The response with memory of its own.

    Outputs may be views of more than their own data, or of memory that a runtime wants back.
    """
    if all(isinstance(each.data, bytes | tuple) for each in response.outputs):
        return response
    return replace(response, outputs=tuple(map(_owned, response.outputs)))


def _owned(tensor: Tensor) -> Tensor:
    if isinstance(tensor.data, bytes | tuple):
        return tensor
    return replace(tensor, data=bytes(tensor.raw()))


def _data_bytes(tensor: Tensor) -> int:
    if isinstance(tensor.data, tuple):
        return sum(ELEMENT_BYTES + len(each) for each in tensor.data)
    return len(tensor.data)
