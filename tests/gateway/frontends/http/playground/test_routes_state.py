"""The state of the playground: numbers of the moment of the request."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from gateway.config import ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.playground.routes import ServerState
from gateway.models.index import IndexRow
from gateway.models.model import Model
from gateway.observability.machine import GpuMetrics
from gateway.settings import ControlMode, MetricsSettings, ModelSettings, Settings
from tests.builders import (
    DECOUPLED,
    TEXT,
    LoadedModels,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve

PLAIN = Settings(metrics=MetricsSettings(cpu=False, gpu=False))
READY = IndexRow("text", "1", "READY")
GIB = 2**30


def text(name: str, *, output: bool = False) -> Any:
    kind = ModelOutput if output else ModelInput
    return kind(name=name, data_type=DataType.TYPE_STRING, dims=(1,))


CHAT = replace(TEXT, input=(text("messages"),))
OPENAI = replace(
    TEXT, input=(text("openai_request"),), output=(text("openai_response", output=True),)
)


class IndexedModels(LoadedModels):
    """Models with an index that the test has written."""

    def __init__(self, index: list[IndexRow], *models: Model) -> None:
        super().__init__(*models)
        self._index = index

    async def index(self, *, ready: bool = False) -> list[IndexRow]:
        """The values that the test sets."""
        return self._index


def state_of(*models: Model, index: tuple[IndexRow, ...] = (READY,)) -> ServerState:
    return ServerState(DataPlane(IndexedModels([*index], *models)), PLAIN)  # type: ignore[arg-type]


async def only_row(state: ServerState) -> dict[str, Any]:
    (row,) = (await soon(state.read()))["models"]
    assert isinstance(row, dict)
    return row


async def test_a_server_shows_its_fleet_if_it_is_part_of_one(serve: Serve) -> None:
    dataplane = DataPlane(IndexedModels([], serve(ScriptedInstance())))  # type: ignore[arg-type]
    state = ServerState(dataplane, PLAIN)
    assert (await soon(state.read()))["fleet"] is None
    described = {"role": "router", "replicas": []}
    dataplane.fleet = SimpleNamespace(describe=lambda: described)  # type: ignore[assignment]
    assert (await soon(state.read()))["fleet"] == described


async def test_a_model_is_shown_with_its_requests_in_flight_and_totals(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=replace(TEXT, model_transaction_policy=DECOUPLED))
    state = state_of(model)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        row = await only_row(state)
        assert (row["in_flight"], row["queued"], row["succeeded"]) == (1, 0, 0)
        execution.answer(text_response("done", tokens=3, final=True))
        execution.end()
        await soon(read_all(stream))
    row = await only_row(state)
    assert (row["in_flight"], row["succeeded"], row["failed"]) == (0, 1, 0)
    assert (row["inferences"], row["executions"]) == (1, 1)
    assert row["request_ns"] >= row["compute_ns"] > 0
    assert (row["completion_tokens"], row["first_tokens"]) == (3, 1)
    assert row["first_token_secs"] > 0
    assert (row["state"], row["reason"], row["decoupled"]) == ("READY", "", True)


async def test_a_request_that_waits_for_an_instance_is_queued(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance)
    with model.submit(text_request()) as first, model.submit(text_request()) as second:
        execution = await instance.begun()
        row = await only_row(state_of(model))
        assert (row["in_flight"], row["queued"]) == (2, 1)
        execution.finish("one")
        (await instance.begun()).finish("two")
        assert [await soon(read_all(each)) for each in (first, second)] == [["one"], ["two"]]


async def test_a_failed_request_is_counted_as_such(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        (await instance.begun()).answer(InferenceError(Code.INTERNAL, "no"))
        with pytest.raises(InferenceError):
            await soon(read_all(stream))
    row = await only_row(state_of(model))
    assert (row["succeeded"], row["failed"]) == (0, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CHAT, {"kind": "chat", "door": "generate"}),
        (OPENAI, {"kind": "chat", "door": "openai"}),
        (replace(CHAT, input=CHAT.input + OPENAI.input), {"kind": "chat", "door": "generate"}),
        (TEXT, {"kind": "tensor"}),
        (replace(CHAT, output=OPENAI.output), {"kind": "tensor"}),
    ],
)
async def test_the_inputs_and_outputs_of_a_model_say_how_to_talk_to_it(
    serve: Serve, config: Any, expected: dict[str, str]
) -> None:
    row = await only_row(state_of(serve(ScriptedInstance(), config=config)))
    assert {key: row[key] for key in ("kind", "door") if key in row} == expected


async def test_a_model_that_is_not_loaded_has_only_its_state_and_the_reason() -> None:
    index = (IndexRow("bad", "1", "UNAVAILABLE", "no such weights"), IndexRow("new"))
    rows = (await soon(state_of(index=index).read()))["models"]
    assert rows == [
        {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "no such weights"},
        {"name": "new", "version": "", "state": "", "reason": ""},
    ]


async def test_a_key_that_may_not_observe_lists_the_ready_models_without_statistics(
    serve: Serve,
) -> None:
    optional = replace(TEXT.input[0], name="more", optional=True)
    config = replace(TEXT, input=(*TEXT.input, optional), max_batch_size=4)
    down = ScriptedInstance()
    ready, dead = serve(ScriptedInstance(), config=config), serve(down)
    down.die("gone")
    await settle()
    found = state_of(ready, dead).ready_models(None)
    assert found["server"]["ready"]
    row = {"name": ready.name, "version": ready.version, "state": "READY", "reason": ""}
    form = {"kind": "tensor", "decoupled": False, "batched": True, "optional": ["more"]}
    assert found["models"] == [row | form]


async def test_models_of_one_name_have_a_row_each(serve: Serve) -> None:
    busy, idle = serve(ScriptedInstance()), serve(ScriptedInstance())
    with busy.submit(text_request()):
        rows = (await soon(state_of(busy, idle, index=(READY, READY)).read()))["models"]
    assert [row["in_flight"] for row in rows] == [1, 0]


class EngineInstance(ScriptedInstance):
    """Has the gauges of an engine that batches by itself."""

    @property
    def metrics(self) -> Iterator[Metric]:
        for name, values in (
            ("vllm:num_requests_running", (3,)),
            ("vllm:num_requests_waiting", (7,)),
            ("vllm:kv_cache_usage_perc", (0.25, 0.5)),
            ("vllm:generation_tokens", (99,)),
        ):
            family = Metric(name, "told by the engine", "gauge")
            for index, value in enumerate(values):
                family.add_sample(name, {"engine": str(index)}, value)
            yield family


async def test_the_queue_and_fullest_cache_of_an_engine_are_shown(serve: Serve) -> None:
    row = await only_row(state_of(serve(EngineInstance())))
    assert row["engine"] == {"running": 3, "waiting": 7, "kv_cache": 0.5}


@pytest.mark.parametrize("mode", ControlMode)
async def test_the_server_says_whether_models_are_loaded_by_request(mode: ControlMode) -> None:
    settings = replace(PLAIN, id="mine", models=ModelSettings(control_mode=mode))
    dataplane = DataPlane(IndexedModels([]))  # type: ignore[arg-type]
    server = (await soon(ServerState(dataplane, settings).read()))["server"]
    assert server["explicit"] == (mode is ControlMode.EXPLICIT)
    assert (server["name"], server["ready"]) == ("mine", True)


async def test_processors_and_memory_of_the_machine_are_shown_if_enabled() -> None:
    dataplane = DataPlane(IndexedModels([]))  # type: ignore[arg-type]
    assert (await soon(ServerState(dataplane, PLAIN).read()))["machine"] == {"gpus": []}
    settings = Settings(metrics=MetricsSettings(gpu=False))
    machine = (await soon(ServerState(dataplane, settings).read()))["machine"]
    assert 0 <= machine["cpu"] <= 1
    assert 0 < machine["memory_used"] < machine["memory_total"]


class TwoGpus:
    """Stands where NVML's GPUs do."""

    def families(self) -> list[Metric]:
        found = []
        for name, values in (
            ("nv_gpu_utilization", (0.5, 0.25)),
            ("nv_gpu_memory_used_bytes", (GIB, 2 * GIB)),
            ("nv_gpu_power_usage", (70, 71)),
        ):
            family = Metric(name, "", "gauge")
            for number, value in enumerate(values):
                family.add_sample(name, {"gpu_uuid": f"GPU-{number}"}, value)
            found.append(family)
        return found


async def test_use_and_memory_of_each_gpu_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuMetrics, "found", TwoGpus)
    dataplane = DataPlane(IndexedModels([]))  # type: ignore[arg-type]
    machine = (await soon(ServerState(dataplane, Settings()).read()))["machine"]
    assert machine["gpus"] == [
        {"id": "GPU-0", "use": 0.5, "memory_used": GIB},
        {"id": "GPU-1", "use": 0.25, "memory_used": 2 * GIB},
    ]
