"""A repository of small models for servers that run inside the test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.in_process.server import Server
from tests.onnx_models import add_sub, write
from tests.serving import write_model

IDENTITY = """
backend: "identity"
input [{ name: "x" data_type: %(type)s dims: [-1] }]
output [{ name: "y" data_type: %(type)s dims: [-1] }]
"""
SLOW = (
    IDENTITY % {"type": "TYPE_FP32"} + 'parameters { key: "delay_us" value { string_value: "%d" }}'
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """`fp32`, `bf16` and `text` echo, `repeat` is decoupled, `add_sub` is ONNX, `slow` waits."""
    repository = tmp_path / "models"
    write_model(repository, "fp32", IDENTITY % {"type": "TYPE_FP32"})
    write_model(repository, "bf16", IDENTITY % {"type": "TYPE_BF16"})
    write_model(repository, "text", IDENTITY % {"type": "TYPE_STRING"})
    write_model(repository, "repeat", 'backend: "repeat"')
    write_model(repository, "slow", SLOW % 60_000_000)
    write(repository, "add_sub", add_sub(("batch", 4)), "max_batch_size: 8")
    return repository


def canceled(page: str, model: str) -> int:
    """The number of a model's cancelled requests, as the metrics page says."""
    return _sample(page, "nv_inference_request_failure", f'model="{model}",reason="CANCELED"')


def in_flight(page: str, model: str) -> int:
    """The number of a model's requests in flight, as the metrics page says."""
    return _sample(page, "gateway_requests_in_flight", f'model="{model}"')


def _sample(page: str, name: str, labels: str) -> int:
    found = [line for line in page.splitlines() if line.startswith(f"{name}{{{labels}")]
    return int(found[0].rpartition(" ")[2])


def stopped_work(server: Server, model: str) -> Callable[[], bool]:
    """Whether the only request of a model was cancelled, and nothing of it is left."""

    def look() -> bool:
        page = server.metrics()
        return (canceled(page, model), in_flight(page, model)) == (1, 0)

    return look
