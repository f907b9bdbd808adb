"""Bodies of generate, decoded."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.http.generate_codec import (
    decode_generate,
)
from gateway.messages import InferRequest
from tests.builders import TEXT

LLM = replace(
    TEXT,
    input=(
        *TEXT.input,
        ModelInput(name="stream", data_type=DataType.TYPE_BOOL, dims=(1,), optional=True),
        ModelInput(
            name="sampling_parameters", data_type=DataType.TYPE_STRING, dims=(1,), optional=True
        ),
    ),
)
"""A model that follows the generation contract."""


def decode(config: ModelConfig, **members: Any) -> InferRequest:
    return decode_generate(members, config)


def refusal(config: ModelConfig, **members: Any) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        decode(config, **members)
    return caught.value.code, caught.value.message
