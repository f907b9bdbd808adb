"""A request that is nothing but the bytes of its only input (raw binary request)."""

import math

from gateway.config import ModelConfig, ModelInput
from gateway.errors import Code, InferenceError
from gateway.messages import request_prefix
from gateway.tensor import SIZES, Datatype, Tensor


def raw_input(config: ModelConfig, body: memoryview) -> Tensor:
    """The one input of the model with the whole body, as a batch of one.

    What the config leaves open in its shape follows from the size. INVALID_ARG if it cannot.
    """
    if len(config.input) != 1:
        raise _refusal(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.input)} inputs in '{config.name}' model configuration"
        )
    expected = config.input[0]
    batch = (1,) if config.batching else ()
    if expected.datatype is Datatype.BYTES:
        if expected.dims != (1,):
            raise _refusal(
                f"For BYTE datatype raw input '{expected.name}', the model must have input shape "
                "[1]"
            )
        return Tensor(expected.name, Datatype.BYTES, (*batch, 1), (bytes(body),))
    shape = (*batch, *_deduced(expected, len(body)))
    return Tensor(expected.name, expected.datatype, shape, body)


def _deduced(expected: ModelInput, byte_size: int) -> tuple[int, ...]:
    if expected.dims.count(-1) > 1:
        raise _refusal(
            f"The shape of the raw input '{expected.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    fixed = math.prod(dim for dim in expected.dims if dim != -1)
    left = byte_size // SIZES[expected.datatype] // fixed if fixed else 0
    return tuple(left if dim == -1 else dim for dim in expected.dims)


def _refusal(text: str) -> InferenceError:
    # Such a request has no room for an id.
    return InferenceError(Code.INVALID_ARG, request_prefix("") + text)
