"""Executions of Python models in real workers, as schedulers drive them."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.python import execution, executions
from gateway.backend import Instance, Note
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SequenceTag
from gateway.tensor import Datatype, array_tensor
from tests.backends.python.loading import (
    CONFIG,
    DECOUPLED,
    TWICE,
    Load,
    answers,
    request,
    soon,
    values,
)
from tests.builders import death_of

MANY = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(x(request)[0])):
                (HERE / "sent").write_text(str(number))
                sender.send(response(np.full(4, number, np.float32)))
            sender.send(flags=FINAL)
"""


async def test_a_batch_is_answered_request_by_request(load: Load) -> None:
    instance = await load(TWICE)
    found = await answers(instance, request(1, 2), request(3))
    assert [index for index, _ in found] == [0, 1]
    assert [values(each) for each in found] == [[2, 4], [6]]
    assert all(isinstance(each, InferResponse) and each.final for _, each in found)


async def test_only_requested_outputs_are_returned(load: Load) -> None:
    instance = await load(TWICE)
    (found,) = await answers(instance, request(1, outputs=(RequestedOutput("z"),)))
    assert isinstance(found[1], InferResponse)
    assert [each.name for each in found[1].outputs] == ["z"]
    assert values(found, "z") == [3]


async def test_large_tensors_cross_in_reused_memory(load: Load) -> None:
    instance = await load(TWICE)
    array = np.arange(1 << 20, dtype=np.float32)
    asked = InferRequest(model="m", inputs=(array_tensor("x", Datatype.FP32, array),))
    opened = []
    for _ in range(10):
        ((_, response),) = await answers(instance, asked)
        assert isinstance(response, InferResponse)
        np.testing.assert_array_equal(response.outputs[0].array(), array * 2)
        np.testing.assert_array_equal(response.outputs[1].array(), array * 3)
        opened.append(segments())
    assert max(opened) < 10  # a few of three tensors each, though thirty have crossed


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:sluice")


async def test_an_output_outlives_its_worker(load: Load) -> None:
    instance = await load(TWICE)
    array = np.ones(1 << 20, np.float32)
    asked = InferRequest(model="m", inputs=(array_tensor("x", Datatype.FP32, array),))
    ((_, response),) = await answers(instance, asked)
    await instance.close()
    assert isinstance(response, InferResponse)
    assert response.outputs[0].array().sum() == 2 * array.size


async def test_all_fields_of_a_request_reach_the_model(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        (r,) = requests
        found = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters()]
        return [response(x(r), parameters={"found": json.dumps(found)})]
""")
    asked = request(
        1,
        id="\N{GREEK SMALL LETTER ALPHA}\ud800",
        sequence=SequenceTag("me", start=True, end=True),
        timeout_us=7,
        parameters={"n": 1, "big": 1 << 70, "text": "x"},
    )
    ((_, found),) = await answers(instance, asked)
    assert isinstance(found, InferResponse)
    text = str(found.parameters["found"])
    assert '"me", 3, 7' in text
    assert str(1 << 70) in text


async def test_numbers_that_are_not_finite_reach_the_model(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        return [response(x(r), parameters={"found": r.parameters()}) for r in requests]
""")
    asked = request(1, parameters={"a": float("nan"), "b": float("-inf"), "c": 0.5})
    ((_, found),) = await answers(instance, asked)
    assert isinstance(found, InferResponse)
    assert found.parameters["found"] == '{"a":NaN,"b":-Infinity,"c":0.5}'


async def test_a_decoupled_model_answers_as_often_as_it_likes(load: Load) -> None:
    instance = await load(MANY, DECOUPLED)
    found = await answers(instance, request(1000))
    assert [values(each)[0] for each in found[:-1]] == list(range(1000))
    assert found[-1] == (0, InferResponse(final=True))


async def test_a_slow_reader_holds_the_model_back(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "HELD_BYTES", 10 * executions.ANSWER_BYTES)
    instance = await load(MANY, DECOUPLED)
    sent = tmp_path / "m" / "1" / "sent"
    async with aclosing(instance.execute([request(4_000)])) as stream:
        await soon(anext(stream))
        before = -1
        while (now := int(sent.read_text() or 0)) != before:
            before = now
            await asyncio.sleep(0.2)
        assert now < 3_200
        for _ in range(now):
            await soon(anext(stream))


async def test_an_instance_is_free_once_execute_has_returned(load: Load) -> None:
    instance = await load(
        """
    def execute(self, requests):
        for each in requests:
            threading.Thread(target=self.answer, args=(each.get_response_sender(), x(each))).start()

    def answer(self, sender, array):
        time.sleep(0.2)
        sender.send(response(array), flags=FINAL)
""",
        DECOUPLED,
    )
    first, second = instance.execute([request(1)]), instance.execute([request(2)])
    assert await soon(anext(first)) == (0, Note.FREED)
    assert await soon(anext(second)) == (0, Note.FREED)
    assert values(await soon(anext(first))) == [1]
    assert values(await soon(anext(second))) == [2]
    for each in (first, second):
        with pytest.raises(StopAsyncIteration):
            await soon(anext(each))


NAPPING = """
    def execute(self, requests):
        if x(requests[0])[0] == 1:
            time.sleep(0.3)
        return [response(x(each)) for each in requests]
"""


async def freed_at_once(instance: Instance) -> bool:
    """Whether the instance takes another execution before a long one has returned."""
    async with aclosing(instance.execute([request(1)])) as stream:
        return await soon(anext(stream)) == (0, Note.FREED)


async def test_short_executions_overlap_unless_batches_would_be_smaller_for_it(
    load: Load,
) -> None:
    instance = await load(NAPPING)
    assert not await freed_at_once(instance)
    for _ in range(40):
        await answers(instance, request(2))
    assert await freed_at_once(instance)
    batching = replace(CONFIG, dynamic_batching=DynamicBatching(), max_batch_size=4)
    instance = await load(NAPPING, batching)
    for _ in range(40):
        await answers(instance, request(2))
    assert not await freed_at_once(instance)


async def test_executions_that_overlap_are_answered_in_order_and_all_end_with_the_worker(
    load: Load,
) -> None:
    instance = await load("""
    def execute(self, requests):
        if x(requests[0])[0] < 0:
            os._exit(9)
        return [response(x(each)) for each in requests]
""")
    await answers(instance, request(1))
    found = await asyncio.gather(*(answers(instance, request(n)) for n in range(3)))
    assert [values(each[-1]) for each in found] == [[0], [1], [2]]
    *_, lost = await asyncio.gather(*(answers(instance, request(n)) for n in (1, -1, 2)))
    assert isinstance(lost[-1][1], InferenceError)
    assert lost[-1][1].code is Code.UNAVAILABLE


async def test_a_disconnect_is_seen_by_the_model_and_waits_for_execute(
    load: Load, tmp_path: Path
) -> None:
    instance = await load(
        """
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        if x(request)[0] == 1:
            sender.send(response(x(request)))
            while not request.is_cancelled():
                time.sleep(0.01)
            (HERE / "seen").touch()
        sender.send(response(x(request)), flags=FINAL)
""",
        DECOUPLED,
    )
    stream = instance.execute([request(1)])
    assert values(await soon(anext(stream))) == [1]
    await soon(stream.aclose())
    assert (tmp_path / "m" / "1" / "seen").exists()
    assert [values(each) for each in await answers(instance, request(5))] == [[5]]


async def test_a_failure_of_execute_fails_the_batch_and_keeps_the_worker(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        if x(requests[0])[0] < 0:
            raise ValueError("negative")
        return [response(x(each)) for each in requests]
""")
    found = await answers(instance, request(-1), request(1))
    assert [index for index, _ in found] == [0, 1]
    for _, error in found:
        assert isinstance(error, InferenceError)
        assert error.code is Code.INTERNAL
        assert error.message == (
            "Failed to process the request(s) for model 'm_0_0', message: ValueError: negative"
        )
    assert [values(each) for each in await answers(instance, request(1))] == [[1]]


async def test_an_error_response_fails_its_request_alone(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        error = pb_utils.TritonError("not you", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error), response(x(requests[1]))]
""")
    (_, refused), served = await answers(instance, request(1), request(2))
    assert isinstance(refused, InferenceError)
    assert (refused.code, refused.message) == (Code.NOT_FOUND, "not you")
    assert values(served) == [2]


async def test_the_end_of_a_worker_is_reported_and_fails_open_and_later_requests(
    load: Load,
) -> None:
    instance = await load("""
    def execute(self, requests):
        os._exit(9)
""")
    dying = asyncio.ensure_future(death_of(instance))
    ((_, error),) = await answers(instance, request(1))
    reason = (
        "its worker process ended: it ended with status 9. Stub process 'm_0_0' is not healthy."
    )
    assert await soon(dying) == reason
    assert isinstance(error, InferenceError)
    assert (error.code, error.dead_instance) == (Code.UNAVAILABLE, 0)
    assert error.message == f"model 'm' failed: {reason}"
    with pytest.raises(InferenceError, match="is not healthy"):
        await answers(instance, request(2))


async def test_answers_sent_before_a_death_are_delivered(load: Load) -> None:
    instance = await load(
        """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for number in range(100):
            sender.send(response(x(requests[0])))
        os._exit(9)
""",
        DECOUPLED,
    )
    *found, (_, error) = await answers(instance, request(1))
    assert [values(each) for each in found] == [[1]] * 100
    assert isinstance(error, InferenceError)


async def test_more_segments_than_may_be_on_their_way_at_once(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        found = [pb_utils.Tensor("y", each.as_numpy() + 1) for each in requests[0].inputs()]
        return [pb_utils.InferenceResponse(found)]
""")
    array = np.arange(16_384, dtype=np.float32)
    inputs = tuple(array_tensor(f"x{n}", Datatype.FP32, array + n) for n in range(400))
    ((_, found),) = await answers(instance, replace(request(1), inputs=inputs))
    assert isinstance(found, InferResponse)
    assert [each.array()[0] for each in found.outputs] == [n + 1 for n in range(400)]


async def test_an_execution_that_fails_leaves_no_segment_behind(load: Load, tmp_path: Path) -> None:
    instance = await load("""
    def execute(self, requests):
        (HERE / "segments").write_text(
            str(sum("memfd:sluice" in line for line in open("/proc/self/maps")))
        )
        return [response(np.zeros(1 << 18, np.float32)), 5]
""")
    for _ in range(10):
        for _, error in await answers(instance, request(1), request(2)):
            assert isinstance(error, InferenceError)
    assert int((tmp_path / "m" / "1" / "segments").read_text()) <= 1


async def test_a_response_without_outputs_is_a_response(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        return [pb_utils.InferenceResponse([], parameters={"n": 1}) for each in requests]
""")
    (_, empty), (_, flag) = await answers(instance, request(1))
    assert empty == InferResponse(parameters={"n": 1}, phases=empty.phases)
    assert flag == InferResponse(final=True)
