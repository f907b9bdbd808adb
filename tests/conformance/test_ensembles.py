"""Ensembles over both wires; what is expected was recorded from Triton 2.51 with python models.

Where Triton only logs a reason, our error has it behind Triton's own text.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from tests.conformance.clients import Client, connect, tensor
from tests.conformance.ensembles import (
    SERVED,
    UNFIT,
    UNLOADED,
    UNREADABLE,
    write_ensembles,
)
from tests.onnx_models import add_sub, write
from tests.serving import WAIT_SECS, Serving, http_get, series, serving, wait_until

FLAGS = (
    *("--exit-on-error=false", "--strict-readiness=false", "--cache-config=local,size=1048576"),
    *("--model-control-mode=explicit", "--load-model=*"),
)
NO_SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
DOUBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: 16 }, { name: "B" data_type: TYPE_FP32 dims: 16 } ]
output { name: "TWICE_A" data_type: TYPE_FP32 dims: 16 }
ensemble_scheduling {
  step {
    model_name: "add_sub" model_version: -1
    input_map { key: "INPUT0" value: "A" } input_map { key: "INPUT1" value: "B" }
    output_map { key: "OUTPUT0" value: "sum" } output_map { key: "OUTPUT1" value: "difference" }
  }
  step {
    model_name: "add_sub" model_version: -1
    input_map { key: "INPUT0" value: "sum" } input_map { key: "INPUT1" value: "difference" }
    output_map { key: "OUTPUT0" value: "TWICE_A" }
  }
}
"""
ADD_SUB = "max_batch_size: 8\ndynamic_batching { }\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ensembles, those that cannot be served included, and one of an ONNX model."""
    folder = tmp_path_factory.mktemp("ensembles")
    write_ensembles(folder)
    write(folder, "add_sub", add_sub(), ADD_SUB)
    (folder / "double" / "1").mkdir(parents=True)
    (folder / "double" / "config.pbtxt").write_text(DOUBLE)
    return folder


def body(*values: int, shape: tuple[int, ...] = (), name: str = "X", **more: Any) -> dict[str, Any]:
    """A request over HTTP."""
    values = values or (1, 2)
    given = {"name": name, "datatype": "INT32", "shape": shape or [len(values)], "data": values}
    return {"inputs": [given], **more}


def ask(http: httpx.Client, model: str, **request: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request over HTTP."""
    found = http.post(f"/v2/models/{model}/infer", json=request or body())
    return found.status_code, found.json()


def outputs(answer: dict[str, Any]) -> dict[str, tuple[list[int], list[int]]]:
    """Shape and data of each output."""
    return {each["name"]: (each["shape"], each["data"]) for each in answer["outputs"]}


def counts(http: httpx.Client, model: str) -> dict[str, Any]:
    """The counts in the statistics of a model."""
    found = http.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
    rows = {key: row["count"] for key, row in found["inference_stats"].items()}
    batches = {row["batch_size"]: row["compute_infer"]["count"] for row in found["batch_stats"]}
    return rows | {
        "inferences": found["inference_count"],
        "executions": found["execution_count"],
        "batches": batches,
        "responses": found["response_stats"],
    }


async def infer(client: Client, model: str, *values: int, **options: Any) -> Any:
    over = tritonclient.http if client.over_http else tritonclient.grpc
    given = over.InferInput("X", [len(values)], "INT32")
    given.set_data_from_numpy(np.array(values, np.int32))
    return await client.call("infer", model, [given], **options)


# Answers.


PLAIN = [
    *("ok", "backwards", "fork", "version", "nested", "opt_unmapped", "opt_mapped", "opt_unmade"),
    *("cached", "of_cached", "says_decoupled"),
]


@pytest.mark.parametrize("model", PLAIN)
async def test_an_ensemble_answers_on_every_wire(client: Client, model: str) -> None:
    found = await infer(client, model, 3, 4)
    assert found.as_numpy("Y").tolist() == [3, 4]


async def test_a_graph_of_onnx_models_computes(client: Client) -> None:
    over = tritonclient.http if client.over_http else tritonclient.grpc
    given = []
    for name, value in (("A", 3.0), ("B", 5.0)):
        given.append(over.InferInput(name, [4, 16], "FP32"))
        given[-1].set_data_from_numpy(np.full((4, 16), value, np.float32))
    found = await client.call("infer", "double", given)
    assert np.array_equal(found.as_numpy("TWICE_A"), np.full((4, 16), 6.0))


async def test_requests_of_many_clients_are_not_mixed_up(server: Serving) -> None:
    async with connect(server, "grpc.aio") as client:
        asked = [infer(client, "fork", number, -number) for number in range(200)]
        found = await asyncio.gather(*asked)
    assert [each.as_numpy("Y").tolist() for each in found] == [[n, -n] for n in range(200)]


def test_the_answer_says_where_in_its_sequence_the_request_is(http: httpx.Client) -> None:
    assert ask(http, "ok")[1]["parameters"] == NO_SEQUENCE
    told = {"sequence_id": "abc", "sequence_start": True, "sequence_end": True}
    _, answer = ask(http, "nested", **body(parameters=told, id="r1"))
    assert (answer["parameters"], answer["id"]) == (told, "r1")
    assert "parameters" not in ask(http, "cached")[1]


@pytest.mark.own_models("the statistics of executions")
def test_steps_for_outputs_that_are_not_requested_do_not_run(http: httpx.Client) -> None:
    before = [counts(http, model)["executions"] for model in ("b", "any")]
    status, answer = ask(http, "two_out", **body(outputs=[{"name": "Z"}]))
    assert (status, outputs(answer)) == (200, {"Z": ([2], [1, 2])})
    after = [counts(http, model)["executions"] for model in ("b", "any")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 1]
    assert list(outputs(ask(http, "two_out")[1])) == ["Y", "Z"]


def test_an_output_that_no_step_produced_is_omitted(http: httpx.Client) -> None:
    status, answer = ask(http, "out_unmade")
    assert (status, outputs(answer)) == (200, {"Y": ([2], [1, 2])})


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("batch", (1, 2), [1, 2]),
        ("batch", (2, 2), [2, 2]),
        ("batch_plain", (1, 2), [1, 2]),
        ("batch_lead", (1, 2), [1, 2]),
        ("plain_batch", (2,), [2]),
        ("any_batch", (1, 2), [1, 2]),
        ("any_batch", (2, 2), [2, 2]),
    ],
)
def test_models_that_batch_and_models_that_do_not_work_together(
    http: httpx.Client, model: str, shape: tuple[int, ...], expected: list[int]
) -> None:
    values = range(int(np.prod(shape)))
    status, answer = ask(http, model, **body(*values, shape=shape))
    assert (status, outputs(answer)) == (200, {"Y": (expected, list(values))})


def test_what_clients_see_reshaped_members_see_as_they_want_it(http: httpx.Client) -> None:
    status, answer = ask(http, "reshaped", **body(1, 2, shape=(1, 2)))
    assert (status, outputs(answer)) == (200, {"Y": ([1, 2], [1, 2])})


def test_labels_are_those_of_the_member_that_makes_the_output(http: httpx.Client) -> None:
    wanted = [{"name": "Y", "parameters": {"classification": 2}}]
    _, answer = ask(http, "labelled", **body(5, 9, outputs=wanted))
    assert outputs(answer) == {"Y": ([2], ["9:1:one", "5:0:zero"])}


# Errors.


MISSING_B = (
    "[request id: r1] expected 2 inputs but got 1 inputs for model 'ab'. Got input(s) ['A'], but "
    "missing required input(s) ['B']. Please provide all required input(s)."
)


@pytest.mark.parametrize(
    ("model", "shape", "code", "message"),
    [
        ("fails", (2,), "INTERNAL", "in ensemble 'fails', no way"),
        (
            "nested_fails",
            (2,),
            "INTERNAL",
            "in ensemble 'nested_fails', in ensemble 'fails', no way",
        ),
        ("opt_needed", (2,), "INVALID_ARGUMENT", f"in ensemble 'opt_needed', {MISSING_B}"),
        ("needed_unmade", (2,), "INVALID_ARGUMENT", f"in ensemble 'needed_unmade', {MISSING_B}"),
        (
            "any_three",
            (2,),
            "INVALID_ARGUMENT",
            "in ensemble 'any_three', [request id: r1] unexpected shape for input 'IN' for model "
            "'three'. Expected [3], got [2]. ",
        ),
        (
            "batch_plain",
            (2, 2),
            "INVALID_ARGUMENT",
            "in ensemble 'batch_plain', [request id: r1] unexpected shape for input 'IN' for model "
            "'a'. Expected [2], got [2,2]. ",
        ),
        (
            "batch_lead",
            (2, 2),
            "INVALID_ARGUMENT",
            "in ensemble 'batch_lead', [request id: r1] unexpected shape for input 'IN' for model "
            "'lead1'. Expected [1,2], got [2,2]. ",
        ),
        (
            "any_batch",
            (5, 2),
            "INVALID_ARGUMENT",
            "in ensemble 'any_batch', [request id: r1] inference request batch-size must be <= 4 "
            "for 'bat4'",
        ),
    ],
)
async def test_the_error_of_a_step_is_the_ensemble_s(
    client: Client, model: str, shape: tuple[int, ...], code: str, message: str
) -> None:
    over = tritonclient.http if client.over_http else tritonclient.grpc
    given = over.InferInput("X", list(shape), "INT32")
    given.set_data_from_numpy(np.zeros(shape, np.int32))
    refused = await client.refusal("infer", model, [given], request_id="r1")
    assert refused == (client.code(code), message)
    assert (await infer(client, "ok", 5, 6)).as_numpy("Y").tolist() == [5, 6]


@pytest.mark.own_models("loads and unloads")
async def test_bad_ensembles_say_why_and_the_others_serve(client: Client) -> None:
    index = await client.call("get_model_repository_index")
    rows = index if client.over_http else [json_row(row) for row in index.models]
    found = {row["name"]: (row["state"], row.get("reason", "")) for row in rows}
    problems = {name: text for name, (_, text) in (UNREADABLE | UNFIT | UNLOADED).items()}
    expected = {
        name: ("UNAVAILABLE", f"Invalid argument: {text}") for name, text in problems.items()
    }
    row = problems["x_dec_cached"].removeprefix("version 1 is at UNAVAILABLE state: ").rstrip(";")
    expected["x_dec_cached"] = ("UNAVAILABLE", row)
    assert {name: found[name] for name in expected} == expected
    assert {name: found[name] for name in SERVED} == dict.fromkeys(SERVED, ("READY", ""))


def json_row(row: Any) -> dict[str, str]:
    return {"name": row.name, "state": row.state, "reason": row.reason}


PROBLEMS = UNFIT | UNLOADED


@pytest.mark.parametrize("name", [*PROBLEMS, "x_loop"])
@pytest.mark.own_models("loads and unloads")
def test_a_load_that_fails_says_why(http: httpx.Client, name: str) -> None:
    status, message = load(http, name)
    if name in PROBLEMS:
        assert (status, message) == (400, f"load failed for model '{name}': {PROBLEMS[name][1]}\n")
    else:
        begin = f"failed to load '{name}', failed to poll from model repository: "
        assert (status, message) == (500, begin + UNREADABLE[name][1])


def load(http: httpx.Client, name: str, operation: str = "load", **config: Any) -> tuple[int, str]:
    parameters = {"parameters": {"config": json.dumps(config)}} if config else {}
    found = http.post(f"/v2/repository/models/{name}/{operation}", json=parameters)
    return found.status_code, found.json()["error"] if found.content else ""


# Decoupled.


@pytest.mark.parametrize(
    ("model", "answers"),
    [("dec_first", 3), ("dec_last", 3), ("dec_dec", 6), ("says_not_decoupled", 3)],
)
def test_a_decoupled_member_makes_the_ensemble_decoupled(
    http: httpx.Client, server: Serving, model: str, answers: int
) -> None:
    config = http.get(f"/v2/models/{model}/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert ask(http, model) == (
        501,
        {"error": "HTTP end point doesn't support models with decoupled transaction policy"},
    )
    with http.stream(
        "POST", f"/v2/models/{model}/generate_stream", json={"X": [1, 2], "id": "g"}
    ) as found:
        events = [json.loads(line[6:]) for line in found.iter_lines() if line.startswith("data: ")]
    expected = {"Y": [1, 2], "id": "g", "model_name": model, "model_version": "1", **NO_SEQUENCE}
    assert events == [expected] * answers
    assert streamed(server, model) == ([[1, 2]] * answers, True)


def streamed(server: Serving, model: str) -> tuple[list[list[int]], bool]:
    """The messages of a gRPC stream, and whether the last message says that it is the last."""
    found: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.append(error or result))
        client.async_stream_infer(
            model,
            [tensor("X", "INT32", np.array([1, 2], np.int32))],
            enable_empty_final_response=True,
        )
        wait_until(lambda: bool(found) and is_final(found[-1]), "the final response")
        client.stop_stream()
    arrays = [each.as_numpy("Y") for each in found]
    return [each.tolist() for each in arrays if each is not None], is_final(found[-1])


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_a_failure_behind_a_decoupled_step_ends_the_stream(http: httpx.Client) -> None:
    found = http.post("/v2/models/dec_fails/generate_stream", json={"X": [1, 2]})
    assert found.status_code == 500
    assert found.text == 'data: {"error":"in ensemble \'dec_fails\', no way"}\n\n'


# Metadata, statistics and metrics of an ensemble.


async def test_metadata_and_config_are_those_of_the_platform_ensemble(client: Client) -> None:
    metadata = await client.metadata("ok")
    assert (metadata.platform, list(metadata.versions)) == ("ensemble", ["1"])
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
        ("X", "INT32", [2])
    ]
    config = await client.config("ok")
    assert (config.platform, config.backend, len(config.instance_group)) == ("ensemble", "", 0)
    assert not config.HasField("optimization")
    assert [(each.model_name, each.model_version) for each in config.ensemble_scheduling.step] == [
        ("a", -1),
        ("b", -1),
    ]
    assert not config.model_transaction_policy.decoupled


@pytest.fixture
def fresh(repository: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Serving]:
    """A server that has served nothing yet, and traces."""
    trace = f"--trace-config=triton,file={tmp_path / 'trace.json'}"
    levels = ("--trace-config=rate=1", "--trace-config=level=TIMESTAMPS", "--trace-config=count=0")
    flags = [*FLAGS[:-1], trace, *levels]
    flags += [
        f"--load-model={name}" for name in ("nested_fails", "batch", "fork", "dec_first", "cached")
    ]
    with serving(repository, *flags, environment=environment) as started:
        yield started


def every(count: int, **others: Any) -> dict[str, Any]:
    """Counts of a model that has served `count` requests, one by one."""
    served = dict.fromkeys(
        ("success", "queue", "compute_input", "compute_infer", "compute_output"), count
    )
    failed = dict.fromkeys(("fail", "cache_hit", "cache_miss"), 0)
    batches = {1: count} if count else {}
    whole = {"inferences": count, "executions": count, "batches": batches, "responses": {}}
    return {**served, **failed, **whole, **others}


@pytest.mark.own_models("the statistics of executions")
def test_an_ensemble_counts_requests_and_its_members_their_executions(fresh: Serving) -> None:
    with httpx.Client(base_url=fresh.http, timeout=WAIT_SECS) as http:
        for _ in range(2):
            assert ask(http, "fork")[0] == 200
        assert ask(http, "nested_fails")[0] == 500
        assert ask(http, "batch", **body(1, 2, shape=(1, 2)))[0] == 200
        assert ask(http, "batch", **body(*range(6), shape=(3, 2)))[0] == 200
        assert (
            http.post("/v2/models/dec_first/generate_stream", json={"X": [1, 2]}).status_code == 200
        )
        assert [ask(http, "cached")[0] for _ in range(2)] == [200, 200]
        assert counts(http, "fork") == every(2)
        assert counts(http, "ab") == every(2)
        assert counts(http, "fails") == every(0, fail=1)
        assert counts(http, "nested_fails") == every(0, fail=1)
        assert counts(http, "batch") == every(2, inferences=4, batches={1: 1, 3: 1})
        assert counts(http, "bat4") == every(2, inferences=4, batches={1: 1, 3: 1})
        assert counts(http, "dec_first") == every(1)
        assert counts(http, "dec")["success"] == 1
        assert counts(http, "cached") == every(1, success=2, queue=2, cache_hit=1, cache_miss=1)
        assert counts(http, "a") == every(4)
        assert counts(http, "b") == every(5)
    page = http_get(fresh.ports["metrics"], "/metrics")[1].decode().splitlines()
    failure = "nv_inference_request_failure"
    for line in (
        f"{series(failure, 'fails', reason='OTHER')} 1",
        f"{series(failure, 'fails', reason='BACKEND')} 0",
        f"{series('nv_inference_exec_count', 'fork')} 2",
        f"{series('nv_inference_pending_request_count', 'fork')} 0",
    ):
        assert line in page


@pytest.mark.own_models("the traces of executions")
def test_the_trace_of_an_ensemble_has_those_of_its_steps(fresh: Serving, tmp_path: Path) -> None:
    with httpx.Client(base_url=fresh.http, timeout=WAIT_SECS) as http:
        settings = {"trace_count": "2", "trace_level": ["TIMESTAMPS"]}
        assert http.post("/v2/trace/setting", json=settings).status_code == 200
        assert ask(http, "fork", **body(id="t1"))[0] == 200
        assert ask(http, "nested_fails", **body(id="t2"))[0] == 500
    file = tmp_path / "trace.json.0"
    wait_until(file.exists, "the trace")
    objects = json.loads(file.read_text())
    kinds = [each for each in objects if "model_name" in each]
    assert [(each["id"], each["model_name"], each.get("parent_id")) for each in kinds] == [
        *((4, "ab", 1), (3, "b", 1), (2, "a", 1), (1, "fork", None)),
        *((8, "failing", 6), (7, "a", 6), (6, "fails", 5), (5, "nested_fails", None)),
    ]
    assert {each["request_id"] for each in kinds} == {"t1", "t2"}
    stamps: dict[int, list[str]] = {}
    for each in objects:
        if "timestamps" in each:
            stamps.setdefault(each["id"], []).append(each["timestamps"][0]["name"])
    computed = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert stamps[4] == ["REQUEST_START", "QUEUE_START", *computed, "REQUEST_END"]
    assert stamps[6] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [name for name in stamps[1] if not name.startswith("HTTP")] == [
        "REQUEST_START",
        "QUEUE_START",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
    ]


# Members come and go.


def state(http: httpx.Client, name: str) -> str:
    rows = http.post("/v2/repository/index", json={}).json()
    return next(f"{row['state']} {row.get('reason', '')}" for row in rows if row["name"] == name)


@pytest.mark.own_models("loads and unloads")
def test_an_ensemble_goes_and_comes_with_its_members(fresh: Serving) -> None:
    with httpx.Client(base_url=fresh.http, timeout=WAIT_SECS) as http:
        assert load(http, "ok") == (200, "")
        assert load(http, "nested") == (200, "")
        assert load(http, "b", "unload") == (200, "")
        wait_until(lambda: state(http, "ok") == "UNAVAILABLE unloaded", "the ensemble has gone")
        assert ask(http, "ok") == (
            404,
            {"error": "Request for unknown model: 'ok' has no available versions"},
        )
        assert http.get("/v2/models/ok/ready").status_code != 200
        assert ask(http, "batch", **body(1, 2, shape=(1, 2)))[0] == 200
        assert load(http, "b") == (200, "")
        assert [ask(http, name)[0] for name in ("ok", "nested")] == [200, 200]
        floats = [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}]
        other = {"backend": "identity", "input": floats, "output": [{**floats[0], "name": "OUT"}]}
        assert load(http, "b", **other) == (200, "")
        assert ask(http, "ok")[0] == 404
        assert load(http, "b") == (200, "")
        assert [ask(http, name)[0] for name in ("ok", "nested")] == [200, 200]


@pytest.mark.own_models("loads and unloads")
async def test_no_request_is_lost_while_members_are_loaded_again(fresh: Serving) -> None:
    asked = 0
    over = asyncio.Event()

    async def keep_asking(client: Client) -> None:
        nonlocal asked
        while not over.is_set():
            found = await infer(client, "fork", asked, 7)
            assert found.as_numpy("Y").tolist()[1] == 7
            asked += 1

    config = json.loads(http_get(fresh.ports["http"], "/v2/models/b/config")[1])
    async with connect(fresh, "grpc.aio") as client, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(keep_asking(client))
        for number in range(5):
            parameters = {"number": {"string_value": str(number)}}
            await client.call(
                "load_model", "b", config=json.dumps({**config, "parameters": parameters})
            )
        over.set()
    assert asked > 20


@pytest.mark.own_models("loads and unloads")
async def test_steps_run_side_by_side_and_stop_when_the_client_leaves(fresh: Serving) -> None:
    def running() -> bool:
        page = http_get(fresh.ports["metrics"], "/metrics")[1].decode()
        return all(f"{series('gateway_requests_in_flight', name)} 1" in page for name in steps)

    steps = ("stuck", "stuck2")
    with httpx.Client(base_url=fresh.http, timeout=WAIT_SECS) as http:
        assert load(http, "fork_stuck") == (200, "")
        async with connect(fresh, "grpc.aio") as client:
            asking = asyncio.ensure_future(infer(client, "fork_stuck", 1, 2))
            await asyncio.to_thread(wait_until, running, "both steps are running")
            asking.cancel()
            await asyncio.wait([asking])
        for name in ("fork_stuck", *steps):
            wait_until(lambda name=name: counts(http, name)["fail"] == 1, f"{name} has stopped")
        assert counts(http, "ab")["success"] == 0
