"""Requests in a worker, and everything that `execute` returns or raises."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import (
    PlayedGateway,
    probe,
    request,
    tensor,
    told,
    worker,
)

Number = Callable[[], int]
RESPONSE = "<class 'sluice_worker.response.InferenceResponse'>"


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
        (
            "requests[0].set_release_flags(2)\nreturn [numbers(1)]",
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{RESPONSE}'.",
        ),
        (
            "requests[0].get_response_sender().send(numbers(1), 1)\nreturn [numbers(2)]",
            "TritonModelException: Unable to send response. Response sender has been closed.",
        ),
        ("raise ValueError('bad value')", "ValueError: bad value"),
        ("raise ValueError", "ValueError: <EMPTY MESSAGE>"),
        ("raise pb_utils.TritonModelException('oops')", "TritonModelException: oops"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: <EMPTY MESSAGE>"),
        ("{}['a']", "KeyError: 'a'"),
        (
            "class Bad(Exception):\n    def __str__(self): raise self\nraise Bad",
            "Bad: <EMPTY MESSAGE>",
        ),
    ],
)
def test_a_broken_rule_or_an_exception_fails_the_execution(
    probed: PlayedGateway, number: Number, code: str, message: str
) -> None:
    error, answers, _ = probe(probed, number(), code)
    assert (error[0], answers) == (message, [])


def test_the_trace_of_an_exception_names_the_place(probed: PlayedGateway, number: Number) -> None:
    error, _, _ = probe(probed, number(), "raise ValueError('bad value')")
    assert "model.py" in error[1]
    assert error[1].endswith("ValueError: bad value\n")


def test_each_request_of_a_batch_gets_its_own_answer(tmp_path: Path) -> None:
    text = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each * 2)]) for each in arrays]
"""
    with worker(tmp_path, text) as gateway:
        (one, first), (two, second) = tensor(1, 2), tensor(3)
        error, answers, body = gateway.execute(
            request(1, one), request(2, two), buffers=[first, second]
        )
        assert error is None
        assert [(number, final, again) for number, _, final, again in answers] == [
            (1, True, False),
            (2, True, False),
        ]
        outputs = [each for _, response, _, _ in answers for each in response[0]]
        sizes = [size for _, _, _, size, _ in outputs]
        assert sizes == [8, 4]
        assert np.frombuffer(body, np.float32).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    ("asked", "sent"), [([], ["y", "z"]), (["z"], ["z"]), (["z", "y"], ["y", "z"])]
)
def test_outputs_that_were_not_requested_are_not_sent(
    probed: PlayedGateway, number: Number, asked: list[str], sent: list[str]
) -> None:
    code = """
one = np.ones(1, np.float32)
return [pb_utils.InferenceResponse([pb_utils.Tensor(name, one) for name in ("nope", "y", "z")])]
"""
    error, answers, _ = probe(probed, number(), code, outputs=asked)
    assert error is None
    assert [each[0] for each in answers[0][1][0]] == sent


def test_the_error_of_one_request_passes_with_its_code(
    probed: PlayedGateway, number: Number
) -> None:
    code = "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('no', 3))]"
    _, answers, _ = probe(probed, number(), code)
    assert answers[0][1:] == [[[], ["INVALID_ARG", "no"], None], True, False]


def test_parameters_of_a_response_pass(probed: PlayedGateway, number: Number) -> None:
    code = "return [pb_utils.InferenceResponse([], parameters={'n': 1, 'ok': True, 's': 'é'})]"
    _, answers, _ = probe(probed, number(), code)
    assert answers[0][1] == [[], None, {"n": 1, "ok": True, "s": "é"}]


def test_a_request_may_be_executed_once_more(probed: PlayedGateway, number: Number) -> None:
    asked = number()
    code = """
requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
return [None]
"""
    assert probe(probed, asked, code)[:2] == [None, [[asked, None, False, True]]]
    assert probe(probed, asked, code.replace("[None]", "None"))[:2] == [
        None,
        [[asked, None, False, True]],
    ]
    assert asked not in [each[0] for each in probed.rest(ToGateway.RESPONSE)]


def test_a_request_that_is_dropped_is_answered_with_an_error(
    probed: PlayedGateway, number: Number
) -> None:
    asked = number()
    assert probe(probed, asked, "return [None]")[:2] == [None, []]
    heard = [0]
    while heard[0] != asked:  # others may have been dropped before it
        heard = probed.hear(ToGateway.RESPONSE).values
    text = "Python model 'm_0_0' dropped a request without its final response."
    assert heard == [asked, [[], ["INTERNAL", text], None], True]


def test_a_request_has_its_fields(probed: PlayedGateway, number: Number) -> None:
    code = """
it = requests[0]
return [texts(*map(repr, (
    it.request_id(), it.correlation_id(), it.flags(), it.timeout(), it.parameters(),
    it.requested_output_names(), it.is_cancelled(), [each.name() for each in it.inputs()],
    it.get_response_sender() is it.get_response_sender(), it.trace().get_context(),
    pb_utils.get_input_tensor_by_name(it, "nope"), pb_utils.get_model_dir() == self.folder(),
)))]
""".replace("self.folder()", "self.args['model_repository'] + '/1'")
    plain = told(probed, number(), code)
    assert plain[:5] == ["''", "0", "0", "0", "'{}'"]
    assert plain[5] in ("{'y', 'z'}", "{'z', 'y'}")
    assert plain[6:] == ["False", "['code']", "True", "None", "None", "True"]
    full = told(
        probed,
        number(),
        code,
        id="i",
        correlation="c",
        flags=3,
        timeout_us=7,
        outputs=["y"],
        parameters={"k": 1, "flag": True, "f": 0.5, "s": "é"},
    )
    assert full[:6] == [
        *("'i'", "'c'", "3", "7"),
        """'{"k":1,"flag":true,"f":0.5,"s":"é"}'""",
        "{'y'}",
    ]


def test_inputs_may_be_changed_in_place_and_returned(tmp_path: Path) -> None:
    text = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0]
        x.as_numpy()[:] += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])]
"""
    with worker(tmp_path, text) as gateway:
        header, data = tensor(1, 2)
        _, answers, body = gateway.execute(request(1, header), buffers=[data])
        assert gateway.arrays(answers[0][1][0], body)["y"].tolist() == [2, 3]


def test_large_tensors_travel_in_reused_segments(tmp_path: Path) -> None:
    text = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])]
"""
    array = np.arange(50_000, dtype=np.float32)
    with worker(tmp_path, text) as gateway:
        seen = set()
        for number in range(1, 6):
            header = gateway.place(array)
            _, answers, body = gateway.execute(request(number, header))
            released = gateway.hear(ToGateway.RELEASED).values
            assert released == [[header[4]], []]
            gateway.outgoing.freed(released[0])
            outputs = answers[0][1][0]
            found = gateway.arrays(outputs, body)["y"]
            np.testing.assert_array_equal(found, array + 1)
            del found
            freed = gateway.incoming.take_released()
            seen.update([header[4], *freed])
            gateway.say(ToWorker.RELEASED, freed, [])
            gateway.ping()
        assert seen == {1}


def test_a_model_without_execute_says_so_at_its_first_request(tmp_path: Path) -> None:
    with worker(tmp_path, "class TritonPythonModel:\n    pass\n") as gateway:
        text = "Python model m/1/model.py does not implement `execute` method."
        assert gateway.failure() == text


ASYNC = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        self.tasks = asyncio.create_task(asyncio.sleep(0))
        await asyncio.sleep(0)
        x = requests[0].inputs()[0].as_numpy()
        if x[0] < 0:
            raise ValueError("negative")
        response = pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
        RETURN
"""


def test_an_async_execute_is_awaited(tmp_path: Path) -> None:
    with worker(tmp_path, ASYNC.replace("RETURN", "return [response]")) as gateway:
        good, bad = tensor(5), tensor(-1)
        _, answers, body = gateway.execute(request(1, good[0]), buffers=[good[1]])
        assert gateway.arrays(answers[0][1][0], body)["y"].tolist() == [5]
        error, _, _ = gateway.execute(request(2, bad[0]), buffers=[bad[1]])
        assert error[0] == "ValueError: negative"


def test_an_async_execute_of_a_decoupled_model_runs_in_the_background(tmp_path: Path) -> None:
    text = ASYNC.replace("RETURN", "requests[0].get_response_sender().send(response, 1)")
    with worker(tmp_path, text, decoupled=True) as gateway:
        good, bad = tensor(5), tensor(-1)
        assert gateway.execute(request(1, good[0]), buffers=[good[1]])[:2] == [None, []]
        heard = gateway.hear(ToGateway.RESPONSE)
        assert (heard.values[0], heard.values[2]) == (1, True)
        assert gateway.execute(request(2, bad[0]), buffers=[bad[1]])[:2] == [None, []]
        level, message, file, _ = gateway.hear(ToGateway.LOG).values
        assert level == "ERROR"
        assert message.startswith("execute of 'm_0_0' failed\nValueError: negative\n")
        assert file.endswith("model.py")
        assert gateway.hear(ToGateway.RESPONSE).values[:1] == [2]


def test_a_decoupled_model_returns_nothing(decoupled: PlayedGateway, number: Number) -> None:
    error, _, _ = probe(decoupled, number(), "return []")
    assert error[0] == (
        "Python model 'm_0_0' is using the decoupled mode and the execute function must return "
        "None."
    )
