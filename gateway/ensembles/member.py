"""What an ensemble needs of the models that its steps call."""

from collections.abc import Mapping
from typing import Protocol

from gateway.config import ModelConfig
from gateway.messages import InferRequest
from gateway.stream import ResponseStream

LATEST = -1
"""The version that a step asks for if it is content with the highest."""


class Member(Protocol):
    """One loaded version of a model that an ensemble calls. The methods are plain."""

    config: ModelConfig

    def call(self, request: InferRequest) -> ResponseStream:
        """Take the request of a step; whoever gets the stream cancels it. Raises InferenceError."""

    def hold(self) -> None:
        """Keep the version loaded, even if it has been replaced, until one more `release`."""

    def release(self) -> None:
        """Let go."""


Members = Mapping[tuple[str, int], Member]
"""The members of one ensemble, by the name and the version that its steps ask for."""
