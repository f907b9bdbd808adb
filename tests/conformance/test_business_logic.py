"""Python models that ask other models, end to end; what is expected is Triton's."""

from collections.abc import Iterator

import httpx
import pytest

from tests.serving import Serving, serving, write_model

HEAD = """
import asyncio
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
WAIT_SECS = 20.0


def shown(response):
    if response.has_error():
        return f"{response.error().code().name}: {response.error().message()}"
    return str([each.as_numpy().tolist() for each in response.output_tensors()])


def text(request):
    found = pb_utils.get_input_tensor_by_name(request, "P")
    return found.as_numpy().reshape(-1)[0].decode()


def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([value], np.object_))])


def ask(model, value):
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["T"],
        inputs=[pb_utils.Tensor("P", np.array([value.encode()], np.object_))],
    )
"""
# Two responses after the cancellation, or the error that says that it was heard.
COUNTS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(answer("first"))
            until = time.monotonic() + WAIT_SECS
            while not sender.is_cancelled() and time.monotonic() < until:
                time.sleep(0.001)
            if text(request) == "obey":
                error = pb_utils.TritonError("I stop", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse([], error), FINAL)
            else:
                sender.send(answer("second"))
                sender.send(answer(str(sender.is_cancelled())), FINAL)
"""
CANCELS = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        responses = ask("counts", text(requests[0])).exec(decoupled=True)
        for response in responses:
            found.append(shown(response))
            responses.cancel()
        return [answer("|".join(found))]
"""
# Answers once four requests are there.
MEETS = """
class TritonPythonModel:
    def initialize(self, args):
        self.met = threading.Barrier(4, timeout=WAIT_SECS)

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self._answer, args=(request.get_response_sender(),)).start()

    def _answer(self, sender):
        try:
            self.met.wait()
            sender.send(answer("met"))
        except threading.BrokenBarrierError:
            sender.send(answer("alone"))
        sender.send(flags=FINAL)
"""
ASKS_FOUR = """
class TritonPythonModel:
    async def execute(self, requests):
        found = await asyncio.gather(*[self._ask() for _ in range(4)])
        return [answer("|".join(found)) for _ in requests]

    async def _ask(self):
        return "".join([shown(each) for each in await ask("meets", "").async_exec(decoupled=True)])
"""
CONFIG = """
backend: "python"
input { name: "P" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "T" data_type: TYPE_STRING dims: [ 1 ] }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
MODELS = {
    "counts": (DECOUPLED, COUNTS),
    "cancels": (CONFIG, CANCELS),
    "meets": (DECOUPLED, MEETS),
    "asks_four": (CONFIG, ASKS_FOUR),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("logic")
    for name, (config, code) in MODELS.items():
        write_model(folder, name, config)
        (folder / name / "1" / "model.py").write_text(HEAD + code)
    with serving(folder) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]


def asked(server: Serving, model: str, text: str) -> str:
    url = f"http://127.0.0.1:{server.ports['http']}/v2/models/{model}/generate"
    found: str = httpx.post(url, json={"P": text}, timeout=40).json()["T"]
    return found


def test_a_model_that_is_cancelled_ends_with_its_own_error(server: Serving) -> None:
    assert asked(server, "cancels", "obey") == "[[b'first']]|CANCELLED: I stop"


def test_a_model_that_ignores_the_cancellation_loses_no_response(server: Serving) -> None:
    found = asked(server, "cancels", "ignore")
    assert found.split("|")[:3] == ["[[b'first']]", "[[b'second']]", "[[b'True']]"]


def test_iterators_that_are_awaited_do_not_block_one_another(server: Serving) -> None:
    assert asked(server, "asks_four", "") == "|".join(["[[b'met']][]"] * 4)
