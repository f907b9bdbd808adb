"""A sequence batcher of either strategy."""

import pytest

from gateway.config import ModelConfig
from tests.gateway.sequences.parts import EITHER


@pytest.fixture(params=EITHER)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return EITHER[request.param]
