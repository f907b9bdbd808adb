"""Conversations with, and cancelling by id in, models that other models or processes work for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.models import DECOUPLED, NEVER_US, identity
from tests.conformance.turns import ask, flags, said, stop, whole
from tests.leaving import IN_FLIGHT, noticed
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, serving, write_model

CHAT = """backend: "python"
input { name: "messages" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""
MODEL = '''
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts until nobody listens any more, or says what it was told."""

    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()[0]
            said = [each["content"] for each in json.loads(given)]
            sender, number = request.get_response_sender(), 0
            while said[-1] == "count" and not sender.is_cancelled():
                number += 1
                sender.send(text(f"{number} "))
                time.sleep(0.01)
            if said[-1] != "count":
                sender.send(text("|".join(said)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def text(value):
    tensor = pb_utils.Tensor("text_output", np.array([value.encode()], dtype=object))
    return pb_utils.InferenceResponse([tensor])
'''
ENSEMBLE = """platform: "ensemble"
input { name: "INPUT" data_type: TYPE_STRING dims: [1] }
output { name: "OUTPUT" data_type: TYPE_STRING dims: [1] }
ensemble_scheduling { step {
  model_name: "member" model_version: -1
  input_map { key: "INPUT" value: "INPUT" }
  output_map { key: "OUTPUT" value: "OUTPUT" }
} }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    repository: Path = tmp_path_factory.mktemp("conversing")
    write_model(repository, "chat", CHAT + DECOUPLED)
    (repository / "chat" / "1" / "model.py").write_text(MODEL)
    write_model(repository, "member", identity("BYTES", "1", delay_us=NEVER_US))
    write_model(repository, "ensemble", ENSEMBLE)
    with serving(repository) as started:
        yield started


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def test_a_python_model_converses_and_is_interrupted(server: Serving, stub: Any) -> None:
    with noticed(server, "chat", 1), streaming(stub) as rpc:
        rpc.ask(ask("count", "a", 1, model="chat", start=True))
        rpc.ask(ask("enough", "b", 1, model="chat"))
        heard = said(rpc.answer())
        rpc.ask(stop("a", "chat"))
        while not flags(answer := rpc.answer())[0]:
            heard += said(answer)
        assert (answer.infer_response.id, flags(answer)) == ("a", (True, True))
        assert whole(rpc) == f"count|{heard}|enough"


@pytest.mark.own_models("the statistics of executions")
def test_an_ensemble_is_cancelled_with_its_members(server: Serving, stub: Any) -> None:
    with noticed(server, "ensemble", 1), streaming(stub) as rpc:
        rpc.ask(infer_request("ensemble", "a", INPUT="x"))
        server.wait_metric(IN_FLIGHT, "member", 1)
        rpc.ask(stop("a", "member"))
        assert "'member' runs no request with the id 'a'" in rpc.answer().error_message
        rpc.ask(stop("a", "ensemble"))
        assert flags(rpc.answer()) == (True, True)
        server.wait_metric(IN_FLIGHT, "member", 0)
