"""Uses of model.py, over both wires; the answers are those of Triton 2.51 unless noted."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.conformance.clients import Client, connect, text
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, serving

MODELS = Path(__file__).parent / "python_models"
FLAGS = ("--model-control-mode=explicit", "--load-model=*")
FAILED = "Failed to process the request(s) for model 'probe_0_0', message: "
SENDER = "sender = requests[0].get_response_sender()\n"
both_wires = pytest.mark.parametrize("client", ["http", "grpc"], indirect=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of this folder; each probe has their shared module next to its model.py."""
    folder = tmp_path_factory.mktemp("python") / "models"
    shutil.copytree(MODELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shared = folder / "probing.py"
    for probe in folder.glob("probe*/1"):
        shutil.copy(shared, probe)
    shared.unlink()
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    """A server whose log may have the traces of models."""
    with serving(repository, *FLAGS) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    assert "execution failed" not in started.text


def inputs(client: Client, code: str) -> list[Any]:
    """The input of a probe."""
    library = tritonclient.http if client.over_http else tritonclient.grpc
    values = np.array([code.encode()], dtype=np.object_)
    found = library.InferInput("code", [1], "BYTES")
    found.set_data_from_numpy(values)
    return [found]


async def told(client: Client, code: str, model: str = "probe", **options: Any) -> list[str]:
    """The texts that a probe answers."""
    answer = await client.call("infer", model, inputs(client, code), **options)
    return [each.decode() for each in answer.as_numpy("text")]


async def refusal(client: Client, code: str, model: str = "probe") -> tuple[str, str]:
    """Code and text with which a probe's request fails."""
    return await client.refusal("infer", model, inputs(client, code))


@both_wires
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return {}", "Expected a list in the execute return, found type '<class 'dict'>'."),
        (
            "return [None, None]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n",
        ),
        (
            "return [5]",
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            "type '<class 'int'>'.",
        ),
        ("raise ValueError('bad value')", "ValueError: bad value"),
        ("raise ValueError", "ValueError: <EMPTY MESSAGE>"),
        ("raise pb_utils.TritonModelException('oops')", "TritonModelException: oops"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("{}['a']", "KeyError: 'a'"),
        ("eval('1 +')", "SyntaxError: invalid syntax (<string>, line 1)"),
    ],
)
async def test_a_failed_execution_fails_its_requests(
    client: Client, code: str, message: str
) -> None:
    assert await refusal(client, code) == (client.code("INTERNAL"), FAILED + message)
    assert await told(client, "return [text('goes on')]") == ["goes on"]


@both_wires
@pytest.mark.parametrize(
    ("name", "shown", "status"),
    [
        ("INVALID_ARG", "INVALID_ARGUMENT", "400"),
        ("NOT_FOUND", "NOT_FOUND", "404"),
        ("UNAVAILABLE", "UNAVAILABLE", "503"),
        ("UNSUPPORTED", "UNIMPLEMENTED", "501"),
        ("CANCELLED", "CANCELLED", "400"),
        ("INTERNAL", "INTERNAL", "500"),
    ],
)
async def test_the_error_of_one_request_passes_unchanged(
    client: Client, name: str, shown: str, status: str
) -> None:
    code = f"""
error = pb_utils.TritonError("no", pb_utils.TritonError.{name})
return [pb_utils.InferenceResponse(error=error)]
"""
    expected = (status if client.over_http else shown, "no")
    assert await refusal(client, code) == expected


@both_wires
async def test_the_error_of_one_request_counts_as_its_answer(client: Client) -> None:
    before = await counted(client)
    await refusal(client, "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('e'))]")
    assert [now - then for now, then in zip(await counted(client), before, strict=True)] == [1, 0]
    await refusal(client, "raise ValueError('no')")
    assert [now - then for now, then in zip(await counted(client), before, strict=True)] == [1, 1]


async def counted(client: Client) -> tuple[int, int]:
    """The number of requests to the probe that have succeeded, and failed."""
    found = (await client.statistics("probe")).model_stats[0].inference_stats
    return found.success.count, found.fail.count


@both_wires
@pytest.mark.parametrize(
    "code",
    [
        "return [pb_utils.InferenceResponse([])]",
        SENDER + "sender.send(pb_utils.InferenceResponse([]), 1)\nreturn None",
        SENDER + "sender.send(pb_utils.InferenceResponse([]))\nsender.send(flags=1)\nreturn None",
    ],
)
async def test_a_response_may_have_no_outputs(client: Client, code: str) -> None:
    answer = await client.call("infer", "probe", inputs(client, code))
    assert answer.as_numpy("text") is None


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_generate_answers_a_response_without_outputs(http: httpx.Client, route: str) -> None:
    body = {"code": "return [pb_utils.InferenceResponse([])]"}
    answer = http.post(f"/v2/models/probe/{route}", json=body)
    assert answer.status_code == 200
    found = json.loads(answer.text.removeprefix("data: "))
    assert found == {"model_name": "probe", "model_version": "1"}


@both_wires
async def test_outputs_are_sent_as_they_are_but_only_those_asked_for(client: Client) -> None:
    code = """
outputs = {"y": np.ones((2, 2), np.int64), "nope": np.zeros(1), "text": np.array([b"t"])}
return [pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in outputs.items()])]
"""
    answer = await client.call("infer", "probe", inputs(client, code))
    assert answer.as_numpy("y").tolist() == [[1, 1], [1, 1]]
    assert answer.as_numpy("nope") is None
    library = tritonclient.http if client.over_http else tritonclient.grpc
    answer = await client.call(
        "infer", "probe", inputs(client, code), outputs=[library.InferRequestedOutput("text")]
    )
    assert (answer.as_numpy("y"), answer.as_numpy("text").tolist()) == (None, [b"t"])


@both_wires
async def test_texts_layouts_and_scalars(client: Client) -> None:
    assert (await told(client, "return [text('é', 3, b'z')]")) == ["é", "3", "z"]
    code = "array = np.arange(6, dtype=np.float32).reshape(2, 3).T\nreturn [numbers(*array)]"
    answer = await client.call("infer", "probe", inputs(client, code))
    assert answer.as_numpy("y").tolist() == [[0, 3], [1, 4], [2, 5]]
    code = "return [pb_utils.InferenceResponse([pb_utils.Tensor('y', np.array(3, np.float32))])]"
    answer = await client.call("infer", "probe", inputs(client, code))
    assert answer.as_numpy("y").shape == ()


@both_wires
async def test_a_request_says_what_the_client_said(client: Client, server: Serving) -> None:
    code = """
it = requests[0]
found = (it.request_id(), it.correlation_id(), it.flags(), it.timeout(), it.parameters())
return [text(*map(repr, found))]
"""
    assert await told(client, code) == ["''", "0", "0", "0", "'{}'"]
    given = {"request_id": "i", "timeout": 9_000_000, "parameters": {"k": 1}}
    found = await told(client, code, **given)
    left_us = int(found.pop(3))
    assert found == ["'i'", "0", "0", "'{\"k\":1}'"]
    # A router sends the time left.
    assert left_us == 9_000_000 or (server.hosts and 8_000_000 < left_us < 9_000_000)


@both_wires
async def test_parameters_of_a_response_reach_the_client(client: Client) -> None:
    # Newer than Triton 2.51.
    code = "return [pb_utils.InferenceResponse([], parameters={'n': 1})]"
    code = code.replace("[]", "[pb_utils.Tensor('y', np.zeros(1, np.float32))]")
    answer = (await client.call("infer", "probe", inputs(client, code))).get_response()
    if client.over_http:
        assert answer["parameters"] == {"n": 1}
    else:
        assert answer.parameters["n"].int64_param == 1


@both_wires
async def test_a_sender_may_answer_from_a_thread_after_execute(client: Client) -> None:
    code = (
        SENDER
        + """
import threading
threading.Timer(0.05, lambda: sender.send(text("late"), 1)).start()
return None
"""
    )
    assert await told(client, code) == ["late"]


@both_wires
async def test_the_rules_of_a_sender(client: Client) -> None:
    code = (
        SENDER
        + """
r = text("first")
self.kept = [caught(sender.send), caught(sender.send, flags=1), caught(sender.send, r, 2)]
self.kept += [caught(sender.send, r, 1), caught(sender.send, r), caught(sender.send, flags=1)]
return None
"""
    )
    assert await told(client, code) == ["first"]
    assert await told(client, "return [text(*self.kept)]") == [
        "TritonModelException: Inference Response object must be provided when the response flags "
        "is set to zero.",
        "TritonModelException: Unable to send response. Non-decoupled model cannot send complete "
        "final before sending a response.",
        "TritonModelException: Unable to send response. Unsupported flag provided.",
        "ok: None",
        "TritonModelException: Unable to send response. Non-decoupled model cannot send more than "
        "one response.",
        "TritonModelException: Unable to send response. Response sender has been closed.",
    ]


@both_wires
async def test_a_request_that_is_dropped_fails_instead_of_waiting_for_ever(client: Client) -> None:
    # Triton would let the client wait.
    assert await refusal(client, "return [None]") == (
        client.code("INTERNAL"),
        "Python model 'probe_0_0' dropped a request without its final response.",
    )


@both_wires
async def test_an_async_execute(client: Client) -> None:
    code = "import asyncio\nawait asyncio.sleep(0)\nreturn [text('fine')]"
    assert await told(client, code, "probe_async") == ["fine"]
    assert await refusal(client, "raise ValueError('no')", "probe_async") == (
        client.code("INTERNAL"),
        FAILED.replace("probe", "probe_async") + "ValueError: no",
    )


@both_wires
async def test_business_logic(client: Client) -> None:
    asked = [
        "add_sub([1, 2, 3, 4])",
        "add_sub([1, 2, 3, 4], outputs=[])",
        "add_sub([-1, 2, 3, 4])",
        "add_sub([1, 2])",
        "add_sub([1, 2, 3, 4], model_name='nope')",
        "add_sub([1, 2, 3, 4], model_version=7)",
        "add_sub([1, 2, 3, 4], outputs=['nope'])",
        "counting(2)",
    ]
    code = f"return [text(*(repr(seen(each.exec())) for each in ({', '.join(asked)})))]"
    failed = "Model add_sub - Error when running inference: "
    not_ready = "Failed for execute the inference request. Model '{0}' is not ready."
    assert await told(client, code) == [
        repr([("OUTPUT0", [2.0, 3.0, 4.0, 5.0])]),
        repr([("OUTPUT0", [2.0, 3.0, 4.0, 5.0]), ("OUTPUT1", [0.0, 1.0, 2.0, 3.0])]),
        repr("negative"),
        repr(
            f"{failed}[request id: <id_unknown>] unexpected shape for input 'INPUT0' for model "
            "'add_sub'. Expected [4], got [2]. "
        ),
        repr("Model nope - Error when running inference: " + not_ready.format("nope")),
        repr(failed + not_ready.format("add_sub")),
        repr(f"{failed}unexpected inference output 'nope' for model 'add_sub'"),
        repr(
            "Model counting - Error when running inference: Model counting is using the decoupled. "
            "The current BLS request call doesn't support models using the decoupled transaction "
            "policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
            "decoupled models.'"
        ),
    ]


@both_wires
async def test_business_logic_of_decoupled_models(client: Client) -> None:
    code = """
it = counting(2).exec(decoupled=True)
found = [[seen(each) for each in it], [seen(each) for each in it]]
found += [[seen(each) for each in counting(0).exec(decoupled=True)]]
found += [[seen(each) for each in add_sub([1, 1, 1, 1]).exec(decoupled=True)]]
return [text(*map(repr, found))]
"""
    counted = repr([[("i", [0])], [("i", [1])], []])
    assert await told(client, code) == [
        *(counted, counted, "[[]]"),
        repr([[("OUTPUT0", [2.0, 2.0, 2.0, 2.0])]]),
    ]


@both_wires
async def test_business_logic_side_by_side(client: Client) -> None:
    code = """
import asyncio
calls = [add_sub([n, 0, 0, 0]).async_exec() for n in range(20)]
found = [seen(each)[0][1][0] for each in await asyncio.gather(*calls)]
async for_all = None
""".replace("async for_all = None\n", "")
    code += "stream = await counting(3).async_exec(decoupled=True)\n"
    code += "return [text(repr(found), repr([seen(each) for each in stream][:3]))]"
    assert await told(client, code, "probe_async") == [
        repr([1.0 + n for n in range(20)]),
        repr([[("i", [n])] for n in range(3)]),
    ]


@both_wires
async def test_large_tensors_through_business_logic(client: Client) -> None:
    code = """
x = pb_utils.Tensor("x", np.arange(500_000, dtype=np.float32))
code = "x = pb_utils.get_input_tensor_by_name(requests[0], 'x')\\n"
code += "return [pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy() + 1)])]"
inner = pb_utils.InferenceRequest(
    model_name="probe", requested_output_names=["y"],
    inputs=[pb_utils.Tensor("code", np.array([code], dtype=object)), x],
)
response = await inner.async_exec()
return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "y")])]
"""
    for _ in range(3):
        answer = await client.call("infer", "probe_async", inputs(client, code))
        expected = np.arange(500_000, dtype=np.float32) + 1
        np.testing.assert_array_equal(answer.as_numpy("y"), expected)


@both_wires
async def test_other_models_can_be_loaded_and_unloaded(client: Client) -> None:
    code = """
load, unload, ready = pb_utils.load_model, pb_utils.unload_model, pb_utils.is_model_ready
found = [caught(load, "add_sub"), caught(ready, "add_sub"), caught(ready, "add_sub", "7")]
found += [caught(ready, "nope"), caught(load, "nope"), caught(load, "add_sub", "", [1])]
return [text(*found)]
"""
    refused = "Failed to process the request for model 'probe_0_0', message: "
    found = await told(client, code)
    assert found[:4] == ["ok: None", "ok: True", "ok: False", "ok: False"]
    assert found[4].startswith(
        f"TritonModelException: Failed to load model: {refused}failed to load 'nope', failed to "
        "poll from model repository"
    )
    assert found[5] == (
        "TritonModelException: failed to load model 'add_sub', files should be a dictionary of "
        "file paths and file contents"
    )


@both_wires
@pytest.mark.own_models("the metrics of models")
async def test_metrics_of_models_are_shown_with_the_servers(
    client: Client, server: Serving
) -> None:
    name = f"custom_{client.wire}"
    code = f"""
F = pb_utils.MetricFamily
family = F("{name}", "a metric", F.COUNTER)
self.{name} = metric = family.Metric(labels={{"wire": "w"}})
self.{name}_family = family
metric.increment(2.5)
same = F("{name}", "a metric", F.COUNTER)
same.Metric(labels={{"wire": "w"}}).increment(1)
return [text(repr(metric.value()), caught(metric.increment, -1))]
"""
    assert await told(client, code) == [
        "3.5",
        "TritonModelException: Failed to increment metric value: Failed to process the request for "
        "model 'probe_0_0', message: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented "
        "monotonically by non-negative values.",
    ]
    shown = {key: value for key, value in server.metrics().items() if key.startswith(name)}
    assert shown == {f'{name}{{wire="w"}}': 3.5}


@both_wires
async def test_lines_of_a_model_are_in_the_servers_log(client: Client, server: Serving) -> None:
    said = f"heard over {client.wire}"
    code = f"pb_utils.Logger.log_warn('{said}')\nprint('{said}, too')\nreturn [text('said')]"
    assert await told(client, code) == ["said"]
    server.wait_logged(said)
    server.wait_logged(f"{said}, too")


@both_wires
async def test_a_model_completes_its_config(client: Client) -> None:
    config = await client.config("completing")
    assert config.max_batch_size == 4
    assert [each.name for each in config.output] == ["doubled", "told"]
    assert config.HasField("dynamic_batching")
    library = tritonclient.http if client.over_http else tritonclient.grpc
    x = library.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(np.array([[1, 2]], np.float32))
    answer = await client.call("infer", "completing", [x])
    assert answer.as_numpy("doubled").tolist() == [[2, 4]]
    found = json.loads(answer.as_numpy("told")[0][0])
    assert found == {"model_version": "1", "max_batch_size": 4}


def streamed(server: Serving, code: str) -> list[Any]:
    """Answers of a decoupled probe over ModelStreamInfer: arrays, "final", or an error's text."""
    request = infer_request("probe_decoupled", "", code=code)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(request)
        found: list[Any] = []
        for answer in rpc.rest():
            response = answer.infer_response
            found += [np.frombuffer(raw, np.float32) for raw in response.raw_output_contents]
            if answer.error_message:
                found.append(answer.error_message)
            elif not (response.outputs or response.parameters["triton_final_response"].bool_param):
                found.append("empty")
            elif response.parameters["triton_final_response"].bool_param:
                found.append("final")
    return [each if isinstance(each, str) else each.tolist() for each in found]


DECOUPLED = FAILED.replace("probe", "probe_decoupled")
STREAMS = [
    (
        SENDER + "for n in range(3): sender.send(numbers(n))\nsender.send(flags=1)",
        [[0], [1], [2], "final"],
    ),
    (SENDER + "sender.send(numbers(1), 1)", [[1], "final"]),
    (SENDER + "sender.send(flags=1)", ["final"]),
    (SENDER + "sender.send(pb_utils.InferenceResponse([]), 1)", ["empty", "final"]),
    (
        SENDER + "sender.send(numbers(1))\nraise ValueError('mid')",
        [[1], DECOUPLED + "ValueError: mid"],
    ),
    (SENDER + "sender.send(numbers(1), 1)\nraise ValueError('mid')", [[1], "final"]),
    (
        "return []",
        [
            DECOUPLED + "Python model 'probe_decoupled_0_0' is using the decoupled mode and the "
            "execute function must return None."
        ],
    ),
    (
        SENDER + "sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError('e')), 1)",
        ["e"],
    ),
    (
        # Triton would let the client wait.
        "return None",
        ["Python model 'probe_decoupled_0_0' dropped a request without its final response."],
    ),
]


@pytest.mark.parametrize(("code", "expected"), STREAMS)
def test_responses_of_a_decoupled_model_over_grpc(
    server: Serving, code: str, expected: list[Any]
) -> None:
    assert streamed(server, code) == expected


@pytest.mark.parametrize(("code", "expected"), STREAMS)
def test_responses_of_a_decoupled_model_over_sse(
    http: httpx.Client, code: str, expected: list[Any]
) -> None:
    body = {"code": code}
    with http.stream("POST", "/v2/models/probe_decoupled/generate_stream", json=body) as answer:
        text = "".join(answer.iter_text())
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    values = [[each["y"]] if "y" in each else each.get("error", "empty") for each in found if each]
    assert values == [each for each in expected if each != "final"]


async def test_a_client_that_goes_is_seen_by_its_model(server: Serving) -> None:
    code = (
        SENDER
        + """
import threading, time
def run():
    while not sender.is_cancelled():
        sender.send(numbers(0))
        time.sleep(0.001)
    pb_utils.Logger.log_info("the client has gone")
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", 7)), 1)
threading.Thread(target=run).start()
""".replace(", 7)", ", pb_utils.TritonError.CANCELLED)")
    )
    client = tritonclient.grpc.aio.InferenceServerClient(server.grpc)

    async def requests() -> Any:
        yield {"model_name": "probe_decoupled", "inputs": [text("code", code)]}

    stream = client.stream_infer(requests())
    async for _, error in stream:
        assert error is None
        break
    stream.cancel()
    await client.close()
    server.wait_logged("the client has gone")


async def test_a_decoupled_model_is_not_asked_without_a_stream(server: Serving) -> None:
    async with connect(server, "http") as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.call("infer", "probe_decoupled", inputs(client, "return None"))
    assert "decoupled transaction policy" in str(caught.value)
