"""Infer requests as bytes, and their refusals."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_request import InferDecoder, OutputForms, Target
from gateway.messages import InferRequest, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype

LIMIT = 1000


UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


MODEL = ModelConfig(
    name="m",
    input=(
        ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(-1,)),
        ModelInput(name="Z", data_type=DataType.TYPE_FP32, dims=(-1,), optional=True),
    ),
)


class Regions(SharedMemory):
    """Shared memory of which a test says what is in it."""

    def __init__(self, **regions: bytes) -> None:
        super().__init__()
        self.regions = regions

    def locate(self, region: SharedRegion) -> SharedRegion:
        if region.name in self.regions:
            return region
        raise InferenceError(
            Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'"
        )

    def read(self, region: SharedRegion, datatype: Datatype | None) -> memoryview:
        data = self.regions[self.locate(region).name]
        return memoryview(data)[region.offset : region.offset + region.byte_size]


def member(name: str = "X", datatype: str = "FP32", **members: Any) -> dict[str, Any]:
    """One entry of `inputs`."""
    return {"name": name, "datatype": datatype, "shape": [2], **members}


def given(*values: Any, **members: Any) -> dict[str, Any]:
    """One entry of `inputs` with its data in JSON."""
    return member(**{"data": list(values), "shape": [len(values)], **members})


def decode(
    found: Mapping[str, Any], binary: bytes = b"", regions: SharedMemory | None = None
) -> tuple[InferRequest, OutputForms]:
    decoder = InferDecoder(regions or Regions(), LIMIT)
    return decoder.decode(Target(MODEL), json.dumps(found).encode(), memoryview(binary))


def request_of(**members: Any) -> InferRequest:
    return decode({"inputs": [given(1.0)], **members})[0]


def refusal(found: Mapping[str, Any], binary: bytes = b"") -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        decode(found, binary)
    return caught.value.code, caught.value.message
