"""The row of the statistics extension."""

import asyncio

from google.protobuf import json_format

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import Phases
from gateway.observability.rows import RESPONSE_DURATIONS, statistics_row
from gateway.observability.statistics import MemoryUsage, ModelStatistics
from gateway.protos import grpc_service_pb2 as pb
from tests.builders import TEXT, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve

DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


def test_a_row_without_traffic_is_complete() -> None:
    row = statistics_row("m", "1", ModelStatistics())
    assert row == {
        "name": "m",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {name: {"count": 0, "ns": 0} for name in DURATIONS},
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


async def test_a_row_counts_requests_inferences_and_executions(serve: Serve) -> None:
    config: ModelConfig = TEXT
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, config=config)
    for outcome in ("one", "two", InferenceError(Code.INTERNAL, "broken")):
        with model.submit(text_request()) as stream:
            execution = await instance.begun()
            if isinstance(outcome, InferenceError):
                execution.crash(outcome)
            else:
                execution.finish(outcome)
            await soon(asyncio.gather(read_all(stream), return_exceptions=True))
    await soon(execution.stopped.wait())
    await soon(model.drained())
    row = statistics_row("m", "1", model.statistics)
    counts = {name: row["inference_stats"][name]["count"] for name in DURATIONS}
    assert counts == {
        "success": 2,
        "fail": 1,
        "queue": 2,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 2,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    assert (row["inference_count"], row["execution_count"]) == (2, 3)
    assert row["last_inference"] > 1_600_000_000_000, "milliseconds since the epoch"
    (batch,) = row["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (1, 3)


def test_batches_are_listed_by_size() -> None:
    statistics = ModelStatistics()
    for size in (8, 1, 4, 1):
        statistics.executed(size, Phases(10, 1000, 20))
    row = statistics_row("m", "1", statistics)
    assert [(each["batch_size"], each["compute_infer"]) for each in row["batch_stats"]] == [
        (1, {"count": 2, "ns": 2000}),
        (4, {"count": 1, "ns": 1000}),
        (8, {"count": 1, "ns": 1000}),
    ]


def test_a_batch_has_its_phases() -> None:
    statistics = ModelStatistics()
    statistics.executed(2, Phases(10, 1000, 20))
    statistics.executed(2, Phases(10, 1000, 20))
    assert statistics_row("m", "1", statistics)["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 2, "ns": 20},
            "compute_infer": {"count": 2, "ns": 2000},
            "compute_output": {"count": 2, "ns": 40},
        }
    ]


def test_memory_is_told_if_a_backend_has_said_how_much() -> None:
    statistics = ModelStatistics(memory=[MemoryUsage("GPU", 1, 4096)])
    row = statistics_row("m", "1", statistics)
    assert row["memory_usage"] == [{"type": "GPU", "id": 1, "byte_size": 4096}]


def test_responses_are_told_apart_by_their_index() -> None:
    statistics = ModelStatistics(responses=[])
    for index in (0, 1):
        row = statistics.response(index)
        assert row is not None
        row.success.add(7)
    found = statistics_row("m", "1", statistics)["response_stats"]
    assert list(found) == ["0", "1"]
    nothing = {name: {"count": 0, "ns": 0} for name in RESPONSE_DURATIONS}
    assert found["1"] == nothing | {"success": {"count": 1, "ns": 7}}


def test_a_full_row_is_a_message_as_well() -> None:
    statistics = ModelStatistics(responses=[], memory=[MemoryUsage("CPU", 0, 1)])
    statistics.response(0)
    statistics.executed(2, Phases(1, 2, 3))
    row = statistics_row("m", "1", statistics)
    message = pb.ModelStatistics(**row)
    told = json_format.MessageToDict(message, preserving_proto_field_name=True)
    assert told["response_stats"].keys() == {"0"}
    assert told["memory_usage"] == [{"type": "CPU", "byte_size": "1"}]
    assert told["batch_stats"][0]["compute_output"] == {"count": "1", "ns": "3"}
