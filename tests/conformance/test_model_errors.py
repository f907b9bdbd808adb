"""Errors of a decoupled Python model among its responses; what is expected is Triton 2.51's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import Code, InferenceError
from gateway.in_process.server import Server
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, serving

PLAN = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def made(number, what):
    if what == "r":
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([number], np.int32))])
    code = pb_utils.TritonError.INVALID_ARG
    return pb_utils.InferenceResponse([], pb_utils.TritonError(f"bad {number}", code))


class TritonPythonModel:
    '''Sends a response for each r and an error for each e; a capital is final, f the flag.'''

    def execute(self, requests):
        for request in requests:
            plan = pb_utils.get_input_tensor_by_name(request, "P").as_numpy().reshape(-1)[0]
            sender = request.get_response_sender()
            for number, each in enumerate(plan.decode()):
                if each == "f":
                    sender.send(flags=FINAL)
                else:
                    sender.send(made(number, each.lower()), FINAL if each.isupper() else 0)
"""
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils


def shown(response):
    if response.has_error():
        return f"{response.error().code().name}: {response.error().message()}"
    return str([each.as_numpy().tolist() for each in response.output_tensors()])


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(each) for each in requests]

    def _answer(self, request):
        plan = pb_utils.get_input_tensor_by_name(request, "P")
        asked = pb_utils.InferenceRequest(
            model_name="plan", requested_output_names=["Y"], inputs=[plan]
        )
        found = [shown(each) for each in asked.exec(decoupled=True)]
        text = np.array(["|".join(found)], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("T", text)])
"""
INPUT = 'input { name: "P" data_type: TYPE_STRING dims: [ 1 ] }\n'
NUMBER = 'output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }\n'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
STEP = """
ensemble_scheduling {
  step {
    model_name: "plan" model_version: -1
    input_map { key: "P" value: "P" } output_map { key: "Y" value: "Y" }
  }
}
"""
MODELS = {
    "plan": ('backend: "python"\n' + INPUT + NUMBER + DECOUPLED, PLAN),
    "once": ('backend: "python"\n' + INPUT + NUMBER, PLAN),
    "asks": (
        'backend: "python"\n' + INPUT + 'output { name: "T" data_type: TYPE_STRING dims: [ 1 ] }\n',
        ASKS,
    ),
    "whole": ('platform: "ensemble"\n' + INPUT + NUMBER + STEP, ""),
}
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    for name, (config, code) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if code:
            (folder / name / "1" / "model.py").write_text(code)
    return folder


@pytest.fixture(scope="module", params=["", "--frontends=2"], ids=["one process", "frontends"])
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    with serving(repository, *filter(None, [request.param])) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.ports['http']}", timeout=20) as client:
        yield client


def events(*members: str) -> str:
    return "".join(f"data: {{{each}}}\n\n" for each in members)


def value(number: int) -> str:
    return f'"Y":{number},"model_name":"plan","model_version":"1"'


@pytest.mark.parametrize(
    ("plan", "status", "expected"),
    [
        ("rerf", 200, events(value(0), '"error":"bad 1"', value(2))),
        ("errf", 400, events('"error":"bad 0"', value(1), value(2))),
        ("rerE", 200, events(value(0), '"error":"bad 1"', value(2), '"error":"bad 3"')),
        ("eef", 400, events('"error":"bad 0"', '"error":"bad 1"')),
    ],
)
def test_generate_stream_continues_after_an_error(
    http: httpx.Client, plan: str, status: int, expected: str
) -> None:
    answer = http.post("/v2/models/plan/generate_stream", json={"P": plan})
    assert (answer.status_code, answer.text) == (status, expected)
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("plan", "status", "text"),
    [
        ("ef", 400, "bad 0"),
        ("E", 400, "bad 0"),
        ("rE", 200, NOT_ONE),
        ("eE", 400, NOT_ONE),
        ("errf", 400, NOT_ONE),
        ("rerf", 200, NOT_ONE),
    ],
)
def test_an_error_counts_as_a_response_of_generate(
    http: httpx.Client, plan: str, status: int, text: str
) -> None:
    answer = http.post("/v2/models/plan/generate", json={"P": plan})
    assert (answer.status_code, answer.json()) == (status, {"error": text})


def test_the_error_of_a_model_with_one_response_fails_it(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "P", "datatype": "BYTES", "shape": [1], "data": ["ef"]}]}
    answer = http.post("/v2/models/once/infer", json=body)
    assert (answer.status_code, answer.json()) == (400, {"error": "bad 0"})


def address(server: Serving) -> str:
    return f"127.0.0.1:{server.ports['grpc']}"


def asked(plan: str, *, empty_final: bool = False) -> Any:
    message = infer_request("plan", "7", P=plan)
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def shown(message: Any) -> tuple[str, str, bool]:
    """The error or the number, the id, and whether the message is final."""
    inner = message.infer_response
    number = "".join(str(int.from_bytes(each, "little")) for each in inner.raw_output_contents)
    final = inner.parameters["triton_final_response"].bool_param
    return message.error_message or number, inner.id, final


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("rerf", [("0", False), ("bad 1", False), ("2", False), ("", True)]),
        ("errf", [("bad 0", False), ("1", False), ("2", False), ("", True)]),
        ("rerE", [("0", False), ("bad 1", False), ("2", False), ("bad 3", True)]),
        ("eE", [("bad 0", False), ("bad 1", True)]),
    ],
)
@pytest.mark.parametrize("empty_final", [True, False])
def test_a_stream_rpc_continues_after_an_error(
    server: Serving, plan: str, expected: list[tuple[str, bool]], empty_final: bool
) -> None:
    with connected(address(server)) as stub, streaming(stub) as rpc:
        rpc.ask(asked(plan, empty_final=empty_final))
        found = [shown(each) for each in rpc.rest()]
    wanted = [(text, "7", final) for text, final in expected if text or empty_final]
    assert found == wanted


def test_in_strict_mode_an_error_ends_the_rpc_after_the_responses_before_it(
    server: Serving,
) -> None:
    with (
        connected(address(server)) as stub,
        streaming(stub, [("triton_grpc_error", "true")]) as rpc,
    ):
        rpc.ask(asked("rerf"))
        assert shown(rpc.answer()) == ("0", "7", False)
        assert rpc.error() == ("INVALID_ARGUMENT", "bad 1")


def test_the_first_error_of_a_member_fails_an_ensemble_after_its_responses(
    http: httpx.Client,
) -> None:
    answer = http.post("/v2/models/whole/generate_stream", json={"P": "rerf"})
    first, second, rest = answer.text.split("\n\n", 2)
    assert first.startswith('data: {"Y":0,')
    assert second == 'data: {"error":"in ensemble \'whole\', bad 1"}'
    assert (answer.status_code, rest) == (200, "")


def test_a_model_that_asks_gets_errors_among_the_responses(http: httpx.Client) -> None:
    """Unlike Triton 2.51, whose iterator leaves the error out."""
    answer = http.post("/v2/models/asks/generate", json={"P": "rerf"})
    assert answer.json()["T"] == "[[0]]|INVALID_ARG: bad 1|[[2]]|[]"


def test_a_stream_that_is_resumed_has_the_errors_again(http: httpx.Client) -> None:
    path = "/v2/models/plan/generate_stream"
    asked = {"P": "rerf", "resumable": True}
    whole = http.post(path, json=asked)
    ids = [line.removeprefix("id: ") for line in whole.text.splitlines() if line.startswith("id")]
    again = http.get(path, headers={"Last-Event-ID": ids[0]})
    assert "bad 1" in whole.text
    assert again.text == whole.text[whole.text.index(f"id: {ids[1]}") :]


def test_a_request_with_errors_among_its_responses_is_one_success(http: httpx.Client) -> None:
    def counts() -> tuple[int, int, int]:
        found = http.get("/v2/models/plan/stats").json()["model_stats"][0]
        errors = sum(each["fail"]["count"] for each in found["response_stats"].values())
        return (*(found["inference_stats"][each]["count"] for each in ("success", "fail")), errors)

    success, fail, errors = counts()
    http.post("/v2/models/plan/generate_stream", json={"P": "rerf"}).read()
    assert counts() == (success + 1, fail, errors + 1)


def test_a_program_gets_errors_among_the_responses(repository: Path) -> None:
    with Server(model_repository=repository) as server:
        model = server.model("plan")
        found = list(model.infer(inputs={"P": ["rerf"]}))
        assert [each.error and each.error.message for each in found] == [None, "bad 1", None]
        with pytest.raises(InferenceError, match="bad 0") as caught:
            server.model("once").infer(inputs={"P": ["ef"]}).only()
    assert caught.value.code is Code.INVALID_ARG
