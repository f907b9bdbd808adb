"""The plans of the stand-in: what a builder of engines would write, for tests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MAGIC = b"stand-in plan\n"
VERSION = "10.14.1"


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """An input, or an output with the operation that computes it from others.

    Those of the operation "layers" are matrices, and names of activations.
    """

    name: str
    dims: Sequence[int]
    type: str = "FLOAT"
    operation: str = ""
    of: Sequence[str] = ()
    host: bool = False
    format: str = "LINEAR"
    layers: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One plan; profiles map dynamic inputs to least, best and most dims."""

    tensors: Sequence[PlannedTensor]
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]] = ({},)
    weights: int = 1000
    scratch: Sequence[int] = (512,)
    version: str = VERSION
    capability: str = "9.0"
    for_dla: bool = False
    version_compatible: bool = False
    plugins: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return MAGIC + json.dumps(asdict(self)).encode()


def read(data: bytes) -> Plan | None:
    """The plan in a file; None if it is none."""
    if not data.startswith(MAGIC):
        return None
    found = json.loads(data[len(MAGIC) :])
    tensors = [PlannedTensor(**each) for each in found.pop("tensors")]
    return Plan(tensors=tensors, **found)
