"""Business logic: requests to other models, their answers, and giving up."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import (
    PROBE,
    PlayedGateway,
    code,
    request,
    worker,
)

Number = Callable[[], int]
ASK = """
def ask(*values, **fields):
    x = pb_utils.Tensor("x", np.array(values, np.float32))
    return pb_utils.InferenceRequest(
        model_name="other", requested_output_names=["y"], inputs=[x], **fields
    )
def seen(response):
    if response.has_error():
        return response.error().code().name, response.error().message()
    return [(each.name(), each.as_numpy().tolist()) for each in response.output_tensors()]
"""


def begin(gateway: PlayedGateway, number: int, text: str) -> None:
    """Have a probe run code that can `ask`."""
    header, data = code(ASK + text)
    gateway.begin(request(number, header), buffers=[data])


def answer(
    gateway: PlayedGateway, call: int, *values: float, final: bool = True, shared: bool = False
) -> None:
    """The other model's response."""
    data = np.array(values, np.float32)
    header = ["y", "FP32", [len(values)], data.nbytes, 0]
    if shared:
        header[4] = gateway.outgoing.place(memoryview(data))
        gateway.say(ToWorker.INFERRED, call, [[header], None, {"p": 0.5}], final)
        return
    response = [[header], None, {"p": 0.5}]
    gateway.say(ToWorker.INFERRED, call, response, final, buffers=[data.tobytes()])


def text_of(gateway: PlayedGateway) -> str:
    """The one text that the probe answers."""
    error, answers, body = gateway.executed()
    assert error is None, error
    return bytes(gateway.arrays(answers[0][1][0], body)["y"])[4:].decode()


def test_a_request_goes_out_as_it_was_made(probed: PlayedGateway, number: Number) -> None:
    asking = number()
    begin(
        probed,
        asking,
        "made = ask(1, 2, request_id='i', correlation_id='c', timeout=7, model_version=3, "
        "parameters={'k': 1})\nmade.set_flags(1)\nreturn [texts(repr(seen(made.exec())))]",
    )
    heard = probed.hear(ToGateway.INFER)
    call, sent, decoupled, served, over_work = heard.values
    assert (sent[0], served, over_work) == (0, [asking], True)
    assert sent[1:] == [
        *("other", "3", "i", "c", 1, 7, 0, {"k": 1}, ["y"], [["x", "FP32", [2], 8, 0]])
    ]
    assert not decoupled
    assert np.frombuffer(heard.body, np.float32).tolist() == [1, 2]
    answer(probed, call, 5)
    assert text_of(probed) == "[('y', [5.0])]"


def test_a_failure_is_a_response(probed: PlayedGateway, number: Number) -> None:
    begin(probed, number(), "return [texts(repr(seen(ask(1).exec())))]")
    call = probed.hear(ToGateway.INFER).values[0]
    probed.say(ToWorker.INFERRED, call, [[], ["NOT_FOUND", "no such model"], None], True)
    assert text_of(probed) == "('NOT_FOUND', 'no such model')"


def test_executions_that_arrive_before_the_answer_are_queued(
    probed: PlayedGateway, number: Number
) -> None:
    begin(probed, number(), "return [texts(repr(seen(ask(1).exec())))]")
    call = probed.hear(ToGateway.INFER).values[0]
    header, data = code("return [texts('second')]")
    probed.begin(request(number(), header), buffers=[data])
    assert probed.rest(ToGateway.EXECUTED) == []
    answer(probed, call, 7)
    first, second = (probed.hear(ToGateway.EXECUTED) for _ in range(2))
    probed.took(2)
    assert b"7.0" in bytes(first.body)
    assert b"second" in bytes(second.body)


def test_a_call_from_a_thread_of_the_model_is_answered_outside_executions(
    probed: PlayedGateway, number: Number
) -> None:
    text = """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor() as threads:
    return [texts(repr(seen(threads.submit(ask(1).exec).result())))]
"""
    begin(probed, number(), text)
    heard = probed.hear(ToGateway.INFER)
    assert heard.values[4] is False
    answer(probed, heard.values[0], 3)
    assert text_of(probed) == "[('y', [3.0])]"


def test_large_answers_are_read_in_place_and_released(
    probed: PlayedGateway, number: Number
) -> None:
    begin(
        probed,
        number(),
        "found = ask(1).exec().output_tensors()[0].as_numpy()\ntotal = float(found.sum())\n"
        "del found\nreturn [texts(repr(total))]",
    )
    call = probed.hear(ToGateway.INFER).values[0]
    answer(probed, call, *np.ones(40_000), shared=True)
    assert text_of(probed) == "40000.0"
    assert len(probed.hear(ToGateway.RELEASED).values[0]) == 1


def test_an_iterator_yields_responses_as_they_arrive_and_again(
    probed: PlayedGateway, number: Number
) -> None:
    text = """
it = ask(1).exec(decoupled=True)
first = seen(next(it))
import threading
return [texts(repr([first, [seen(each) for each in it], [seen(each) for each in it]]))]
"""
    begin(probed, number(), text)
    heard = probed.hear(ToGateway.INFER)
    assert heard.values[2] is True
    call = heard.values[0]
    answer(probed, call, 1, final=False)
    answer(probed, call, 2, final=False)
    probed.say(ToWorker.INFERRED, call, None, True)
    one, two, empty = [("y", [1.0])], [("y", [2.0])], list[object]()
    assert text_of(probed) == repr([one, [two, empty], [one, two, empty]])


def test_after_a_cancel_responses_still_arrive(probed: PlayedGateway, number: Number) -> None:
    text = "it = ask(1).exec(decoupled=True)\nnext(it)\nit.cancel()\nit.cancel()\n"
    begin(probed, number(), text + "return [texts(repr([seen(each) for each in it]))]")
    call = probed.hear(ToGateway.INFER).values[0]
    answer(probed, call, 1, final=False)
    assert probed.hear(ToGateway.CANCEL_INFER).values == [call, False]
    answer(probed, call, 2, final=False)
    probed.say(ToWorker.INFERRED, call, [[], ["CANCELLED", "it stops"], None], True)
    assert text_of(probed) == repr([[("y", [2.0])], ("CANCELLED", "it stops")])
    assert probed.rest(ToGateway.CANCEL_INFER) == []


@pytest.mark.parametrize("ending", ["it = None", "del it"])
def test_a_dropped_iterator_cancels_its_call(
    probed: PlayedGateway, number: Number, ending: str
) -> None:
    text = f"it = ask(1).exec(decoupled=True)\nnext(it)\n{ending}\nreturn [texts('gone')]"
    begin(probed, number(), text)
    call = probed.hear(ToGateway.INFER).values[0]
    answer(probed, call, 1, final=False)
    assert probed.hear(ToGateway.CANCEL_INFER).values == [call, True]
    assert text_of(probed) == "gone"
    # Answers still on their way have no receiver, and are dropped.
    answer(probed, call, 2)
    probed.ping()


@pytest.fixture(scope="module")
def awaited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedGateway]:
    """A probe whose `execute` is a coroutine."""
    text = PROBE.replace("def execute", "async def execute").replace("def run", "async def run")
    text = text.replace('return found["run"]', 'return await found["run"]')
    with worker(tmp_path_factory.mktemp("awaited"), text) as found:
        yield found


def test_calls_can_be_concurrent(awaited: PlayedGateway, number: Number) -> None:
    text = """
import asyncio
answers = await asyncio.gather(ask(1).async_exec(), ask(2).async_exec())
streamed = [seen(each) for each in await ask(3).async_exec(decoupled=True)]
return [texts(repr([seen(each) for each in answers] + streamed))]
"""
    begin(awaited, number(), text)
    first, second = (awaited.hear(ToGateway.INFER).values[0] for _ in range(2))
    answer(awaited, second, 20)
    answer(awaited, first, 10)
    answer(awaited, awaited.hear(ToGateway.INFER).values[0], 30)
    assert text_of(awaited) == "[[('y', [10.0])], [('y', [20.0])], [('y', [30.0])]]"


def test_a_call_that_is_cancelled_is_taken_back(awaited: PlayedGateway, number: Number) -> None:
    text = """
import asyncio
call = ask(1).async_exec()
call.cancel()
await asyncio.sleep(0)
return [texts(repr(call.cancelled()))]
"""
    begin(awaited, number(), text)
    call = awaited.hear(ToGateway.INFER).values[0]
    assert awaited.hear(ToGateway.CANCEL_INFER).values == [call, True]
    assert text_of(awaited) == "True"
    answer(awaited, call, 1)
    awaited.ping()


def test_an_iterator_that_is_awaited_has_its_first_response(
    awaited: PlayedGateway, number: Number
) -> None:
    """Its reader blocks no other: each of these calls before any of them has an answer."""
    text = """
import asyncio
async def read(value):
    return [seen(each) for each in await ask(value).async_exec(decoupled=True)]
return [texts(repr(await asyncio.gather(read(1), read(2), read(3))))]
"""
    begin(awaited, number(), text)
    calls = [awaited.hear(ToGateway.INFER).values[0] for _ in range(3)]
    for value, call in reversed(list(enumerate(calls))):
        answer(awaited, call, value, final=False)
        answer(awaited, call, value + 10)
    found = [[[("y", [value])], [("y", [value + 10])]] for value in (0.0, 1.0, 2.0)]
    assert text_of(awaited) == repr(found)


def test_an_iterator_that_is_awaited_no_more_is_taken_back(
    awaited: PlayedGateway, number: Number
) -> None:
    text = """
import asyncio
call = ask(1).async_exec(decoupled=True)
call.cancel()
await asyncio.sleep(0)
return [texts(repr(call.cancelled()))]
"""
    begin(awaited, number(), text)
    call = awaited.hear(ToGateway.INFER).values[0]
    assert awaited.hear(ToGateway.CANCEL_INFER).values == [call, True]
    assert text_of(awaited) == "True"
    answer(awaited, call, 1)
    awaited.ping()
    assert awaited.rest(ToGateway.CANCEL_INFER) == []


def test_other_models_cannot_be_called_before_the_first_request(tmp_path: Path) -> None:
    text = """
class TritonPythonModel:
    def initialize(self, args):
        x = pb_utils.Tensor("x", np.zeros(1, np.float32))
        pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=[x]
        ).exec()
"""
    with pytest.raises(AssertionError) as caught, worker(tmp_path, text):
        pass
    message = "TritonModelException: BLS is only supported during the 'execute' function."
    assert message in str(caught.value)


def test_the_loop_must_run_for_calls_that_are_awaited(
    probed: PlayedGateway, number: Number
) -> None:
    begin(probed, number(), "return [texts(caught(ask(1).async_exec))]")
    assert text_of(probed) == "RuntimeError: no running event loop"
