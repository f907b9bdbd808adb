"""The ratio of the tokens of prompts to their bytes."""

import math

from gateway.messages import InferRequest
from gateway.tensor import Datatype, Tensor

FIRST_RATIO = 0.25
RATIO_BYTES = 1 << 20
"""Bytes of prompts after which an older ratio of tokens to bytes counts for a third (1/e)."""


class TokenRatio:
    """The tokens of a byte of prompts of one model, learned from usage."""

    def __init__(self) -> None:
        self.value = FIRST_RATIO

    def learn(self, size_bytes: int, tokens: int) -> None:
        """Take the usage of a request into account; longer prompts count more."""
        if size_bytes > 0 and tokens > 0:
            share = 1 - math.exp(-size_bytes / RATIO_BYTES)
            self.value += share * (tokens / size_bytes - self.value)

    def tokens(self, size_bytes: int) -> int:
        """The expected tokens of a prompt."""
        return round(size_bytes * self.value)


def text_bytes(request: InferRequest) -> int:
    """The bytes of the texts of a request."""
    return sum(map(size_bytes, request.inputs))


def size_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor of texts."""
    data = tensor.data
    if tensor.datatype is not Datatype.BYTES:
        return 0
    return sum(map(len, data)) if isinstance(data, tuple) else len(tensor.raw())
