"""What the whole check was asked for, in a form that its processes are told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CUDA = "cuda"
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """On which device, and how much: streams and tokens of LLMs, seconds of each rate."""

    device: str
    streams: Sequence[int]
    max_tokens: int
    secs: float

    @property
    def kind(self) -> str:
        """The kind of instances of tensor models."""
        return "KIND_GPU" if self.device == CUDA else "KIND_CPU"

    def as_json(self) -> dict[str, Any]:
        """For the command line of a part."""
        return asdict(self)
