"""Executions of models before they serve, as clients see it; Triton gave the same answers."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client
from tests.conformance.models import DECOUPLED, identity, scripted
from tests.serving import Serving, series, write_model

FLAGS = ("--exit-on-error=false", "--strict-readiness=false", "--log-verbose=1")

ZEROS = "data_type: TYPE_INT32 dims: [2] zero_data: true"
FILE = 'data_type: TYPE_INT32 dims: [2] input_data_file: "d"'


def sample(source: str, name: str = "s", size: int = 1, count: int = 0) -> str:
    inputs = f'inputs {{ key: "INPUT" value {{ {source} }} }}'
    return f'model_warmup {{ name: "{name}" batch_size: {size} count: {count} {inputs} }}\n'


WARM = {
    "ok": identity("INT32", "2") + sample(ZEROS, count=3),
    "batched": identity("INT32", "2")
    + "max_batch_size: 4\n"
    + sample(ZEROS, size=3, count=2)
    + sample(ZEROS.replace("zero_", "random_"), name="t"),
    "batcher": identity("INT32", "2")
    + "max_batch_size: 4 dynamic_batching { }\n"
    + sample(ZEROS, size=2),
    "file": identity("INT32", "2") + "max_batch_size: 4\n" + sample(FILE, size=2),
    "skipped": identity("INT32", "2") + sample(ZEROS, size=0),
    "zero_false": identity("INT32", "2") + sample(ZEROS.replace("true", "false")),
    "served": identity("INT32", "2") + sample(ZEROS),
    "decoupled": scripted({"text": "one"}, {"text": "two"}, {"final": True})
    + DECOUPLED
    + sample("data_type: TYPE_STRING dims: [1] zero_data: true").replace("INPUT", "text_input"),
}
COLD = {
    "failing": identity("INT32", "2", fail="no way")
    + "max_batch_size: 4\n"
    + sample(ZEROS, size=2),
    "batch_beyond": identity("INT32", "2") + "max_batch_size: 4\n" + sample(ZEROS, size=5),
    "file_short": identity("INT32", "2") + sample(FILE),
    "file_absent": identity("INT32", "2") + sample(FILE),
    "file_up": identity("INT32", "2") + sample(FILE.replace('"d"', '"../config.pbtxt"')),
    "file_absolute": identity("INT32", "2") + sample(FILE.replace('"d"', '"/etc/passwd"')),
    "huge": identity("INT32", "-1") + sample(ZEROS.replace("[2]", "[9000000000000000000]")),
    "wrong_shape": identity("INT32", "2") + sample(ZEROS.replace("[2]", "[3]")),
    "second_fails": identity("INT32", "2") + sample(ZEROS) + sample(ZEROS.replace("[2]", "[-1]")),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warmup")
    for name, config in (WARM | COLD).items():
        write_model(folder, name, config)
    for name, data in {"file": struct.pack("<3i", 7, 8, 9), "file_short": b"abc"}.items():
        (folder / name / "warmup").mkdir()
        (folder / name / "warmup" / "d").write_bytes(data)
    return folder


async def index(client: Client) -> dict[str, tuple[str, str]]:
    """State and reason of each model."""
    found = await client.call("get_model_repository_index")
    if client.over_http:
        return {each["name"]: (each["state"], each.get("reason", "")) for each in found}
    return {each.name: (each.state, each.reason) for each in found.models}


async def test_a_warm_model_is_ready(client: Client) -> None:
    found = await index(client)
    assert {name for name, (state, _) in found.items() if state == "READY"} == WARM.keys()


@pytest.mark.own_models("loads and unloads")
async def test_a_model_whose_warmup_failed_has_a_reason(client: Client) -> None:
    found = await index(client)
    anonymous = "Invalid argument: [request id: <id_unknown>] "
    assert {name: found[name][1] for name in COLD if name != "huge"} == {
        "failing": "Invalid argument: failed to run warmup sample 's': no way; no way; ",
        "batch_beyond": "Invalid argument: failed to run warmup sample 's': batch size 5 for "
        "'batch_beyond', max allowed is 4; ",
        "file_short": f"{anonymous}warmup setting expects 8 bytes, but the data provided from "
        "donly has 3 bytes",
        "file_absent": "Internal: failed to open text file for read file_absent/warmup/d: No such "
        "file or directory",
        "file_up": "Invalid argument: warmup data file '../config.pbtxt' is outside the warmup "
        "directory of model 'file_up'",
        "file_absolute": "Invalid argument: warmup data file '/etc/passwd' is outside the warmup "
        "directory of model 'file_absolute'",
        "wrong_shape": f"{anonymous}unexpected shape for input 'INPUT' for model 'wrong_shape'. "
        "Expected [2], got [3]. ",
        "second_fails": "Invalid argument: warmup setting expects all variable-size dimensions "
        "are specified for input 'INPUT'",
    }
    assert "more than the 2147483647 that a sample may have" in found["huge"][1]
    assert {found[name][0] for name in COLD} == {"UNAVAILABLE"}


@pytest.mark.parametrize(
    ("model", "inferences", "executions", "batches"),
    [
        ("ok", 3, 3, {1: 3}),
        ("batched", 7, 3, {3: 2, 1: 1}),
        ("batcher", 2, 1, {2: 1}),
        ("file", 2, 1, {2: 1}),
        ("skipped", 0, 0, {}),
        ("zero_false", 1, 1, {1: 1}),
        ("decoupled", 1, 1, {1: 1}),
    ],
)
@pytest.mark.own_models("the statistics of executions")
async def test_the_requests_of_a_warm_up_count(
    client: Client,
    server: Serving,
    model: str,
    inferences: int,
    executions: int,
    batches: dict[int, int],
) -> None:
    (row,) = (await client.statistics(model)).model_stats
    assert (row.inference_count, row.execution_count) == (inferences, executions)
    assert (row.inference_stats.success.count, row.inference_stats.queue.count) == (
        inferences,
        inferences,
    )
    assert {each.batch_size: each.compute_infer.count for each in row.batch_stats} == batches
    page = server.metrics()
    assert page[series("nv_inference_request_success", model)] == inferences
    assert page[series("nv_inference_pending_request_count", model)] == 0


@pytest.mark.own_models("loads and unloads")
async def test_each_iteration_is_a_verbose_line(server: Serving) -> None:
    for number in (1, 2, 3):
        line = f"model 'ok' instance ok_0 is running warmup sample 's' for iteration {number}"
        assert sum(line in each for each in server.log) == 1


def numbers(client: Client, *values: int) -> list[Any]:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    tensor = library.InferInput("INPUT", [len(values)], "INT32")
    tensor.set_data_from_numpy(np.array(values, dtype=np.int32))
    return [tensor]


async def test_the_server_serves_those_that_are_warm(client: Client) -> None:
    found = await client.call("infer", "served", numbers(client, 3, 4))
    assert found.as_numpy("OUTPUT").tolist() == [3, 4]
