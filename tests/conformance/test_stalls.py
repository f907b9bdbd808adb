"""With `--stall-secs`: a Python model that hangs is restarted, one that is only slow is not."""

import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

STALLS = "sluice_stalls_total"
OLDEST = "sluice_oldest_request_seconds"
IO = """
backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
HANGS = """
    import time
    import triton_python_backend_utils as pb

    class TritonPythonModel:
        def execute(self, requests):
            found = [pb.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
            time.sleep(0.005)  # too long for a second execution to be sent behind this one
            while any(each[0] < 0 for each in found):
                time.sleep(0.1)
            return [pb.InferenceResponse([pb.Tensor("y", each)]) for each in found]
"""
CALLS = """
    import time
    import triton_python_backend_utils as pb

    class TritonPythonModel:
        def execute(self, requests):
            return [self.ask(each) for each in requests]

        def ask(self, request):
            asked = pb.InferenceRequest(
                model_name="hangs", requested_output_names=["y"], inputs=request.inputs()
            )
            found = asked.exec()
            if found.has_error():
                raise pb.TritonModelException(found.error().message())
            return pb.InferenceResponse(found.output_tensors())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    repository: Path = tmp_path_factory.mktemp("stalls")
    for name, code in (("hangs", HANGS), ("calls", CALLS)):
        write_model(repository, name, IO)
        (repository / name / "1" / "model.py").write_text(textwrap.dedent(code))
    with serving(repository, "--stall-secs=1.5") as running:
        yield running


def infer(server: Serving, model: str, value: float) -> httpx.Response:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}]}
    url = f"{server.http}/v2/models/{model}/infer"
    return httpx.post(url, json=body, timeout=WAIT_SECS)


@pytest.mark.parametrize("model", ["hangs", "calls"])
@pytest.mark.own_models("the watch for stalls")
def test_a_hung_worker_is_replaced_and_what_waits_for_it_is_served(
    server: Serving, model: str
) -> None:
    before = server.metric(STALLS, "hangs")
    answers: dict[float, httpx.Response] = {}

    def ask(value: float) -> None:
        answers[value] = infer(server, model if value < 0 else "hangs", value)

    hung = threading.Thread(target=ask, args=(-1.0,))
    hung.start()
    wait_until(lambda: server.metric(OLDEST, "hangs") > 0, "the request is in flight")
    queued = threading.Thread(target=ask, args=(2.0,))
    queued.start()
    for thread in (hung, queued):
        thread.join(WAIT_SECS)
    assert "it has made no progress for 1.5 s" in answers[-1.0].json()["error"]
    if model == "hangs":
        assert answers[-1.0].status_code == 503
    assert answers[2.0].json()["outputs"][0]["data"] == [2.0]
    assert server.metric(STALLS, "hangs") == before + 1
    assert server.metric(STALLS, "calls") == 0, "it only waited for the other one"
    assert server.metric(OLDEST, "hangs") == 0
    assert any("instance stalled model=hangs" in line for line in server.log)
