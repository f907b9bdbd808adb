"""The trace that vLLM's own spans continue."""

from types import SimpleNamespace
from typing import Any

import pytest

from backends.vllm.engine_request import EngineRequest, headers_of
from gateway.messages import InferRequest
from gateway.processes.request_terms import TraceParent

PARENT = TraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Engine:
    """An engine that notes the options of its requests."""

    errored = True

    def __init__(self, endpoint: str | None) -> None:
        self.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
        self.options: dict[str, Any] = {}

    async def add_request(self, *_: Any, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(request_id="inside")


@pytest.mark.parametrize(
    ("endpoint", "trace", "passed"),
    [
        ("http://localhost:4317", PARENT, {"trace_headers": PARENT.headers}),
        (None, PARENT, {}),
        ("http://localhost:4317", None, {}),
    ],
    ids=["traced", "engine does not trace", "not traced"],
)
async def test_a_traced_request_has_the_headers_of_its_trace(
    endpoint: str | None, trace: TraceParent | None, passed: dict[str, Any]
) -> None:
    engine = Engine(endpoint)
    request = InferRequest(model="m", trace=trace)
    async with EngineRequest(engine, "1", lambda _: None) as running:
        running.trace_headers = headers_of(request, engine)
        await running.submit("prompt", None)
    assert engine.options == passed
