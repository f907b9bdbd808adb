"""Python models in real workers, driven as the schedulers drive any instance."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.python import backend as module
from backends.python import execution, executions
from backends.python.backend import PythonBackend
from backends.python.environments import Places, WorkerEnvironment
from gateway.backend import Instance, ModelContext, Note
from gateway.config import (
    ModelConfig,
)
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SequenceTag
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor, array_tensor
from tests.backends.python.loading import (
    CONFIG,
    DECOUPLED,
    Load,
    Others,
    answers,
    nobody,
    request,
    soon,
    values,
    write,
)
from tests.builders import settle
from tests.serving import wait_until

TWICE = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", x(each) * 2), pb_utils.Tensor("z", x(each) * 3)]
            )
            for each in requests
        ]
"""
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
    async with aclosing(instance.execute([request(50_000)])) as stream:
        await soon(anext(stream))
        before = -1
        while (now := int(sent.read_text() or 0)) != before:
            before = now
            await asyncio.sleep(0.2)
        assert now < 40_000
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
    dying = asyncio.ensure_future(instance.died())
    ((_, error),) = await answers(instance, request(1))
    reason = (
        "its worker process ended: it ended with status 9. Stub process 'm_0_0' is not healthy."
    )
    assert await soon(dying) == reason
    assert isinstance(error, InferenceError)
    assert error.code is Code.UNAVAILABLE
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


async def test_a_worker_keeps_to_its_cores(load: Load) -> None:
    core = max(os.sched_getaffinity(0))
    instance = await load(
        """
    def execute(self, requests):
        found = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        cores = sorted(os.sched_getaffinity(0) | found[0])
        return [response(np.array(cores, np.float32)) for _ in requests]
""",
        cpu_cores=frozenset({core}),
    )
    (answer,) = await answers(instance, request(1))
    assert values(answer) == [core]


async def test_a_close_that_is_cancelled_still_ends_its_worker(load: Load, tmp_path: Path) -> None:
    instance = await load("""
    def execute(self, requests):
        return [None]

    def finalize(self):
        (HERE / "finalizing").write_text("")
        time.sleep(60)
    """)
    closing = asyncio.create_task(instance.close())
    finalizing = tmp_path / "m" / "1" / "finalizing"
    await asyncio.to_thread(wait_until, finalizing.exists, "it finalizes")
    assert not instance.alive
    closing.cancel()
    await soon(asyncio.wait([closing]))
    assert "was stopped" in await soon(instance.died())


async def test_finalize_is_called_once_and_its_failure_is_logged(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    instance = await load("""
    def execute(self, requests):
        pass

    def finalize(self):
        with open(HERE / "finalized", "a") as file:
            file.write("once")
        raise ValueError("too late")
""")
    await soon(instance.close())
    assert (tmp_path / "m" / "1" / "finalized").read_text() == "once"
    assert "finalize failed" in caplog.text


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (
            "return False",
            Code.UNAVAILABLE,
            "Model 'm_0_0' is not ready (user-defined check failed).",
        ),
        ("return 1", Code.INTERNAL, "is_ready() must return a boolean value"),
        ("raise ValueError('sick')", Code.INTERNAL, "ValueError: sick"),
    ],
)
async def test_a_model_may_say_that_it_is_not_ready(
    load: Load, body: str, code: Code, text: str
) -> None:
    instance = await load(f"{TWICE}\n    def is_ready(self):\n        {body}\n")
    with pytest.raises(InferenceError) as refused:
        await soon(instance.check_ready())
    assert refused.value.code is code
    assert text in refused.value.message
    assert await answers(instance, request(1))


async def test_concurrent_checks_share_one_call(load: Load, tmp_path: Path) -> None:
    instance = await load(f"""{TWICE}
    def is_ready(self):
        with open(HERE / "asked", "a") as file:
            file.write("x")
        time.sleep(0.3)
        return True
""")
    await soon(asyncio.gather(*(instance.check_ready() for _ in range(5))))
    assert (tmp_path / "m" / "1" / "asked").read_text() == "x"
    await soon(instance.check_ready())
    assert (tmp_path / "m" / "1" / "asked").read_text() == "xx"


async def test_a_model_without_a_check_is_ready(load: Load) -> None:
    await soon((await load(TWICE)).check_ready())


ASK = """
    def execute(self, requests):
        (request,) = requests
        found = pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=[request.inputs()[0]],
        ).exec(decoupled=DECOUPLED)
        if not DECOUPLED:
            found = [found]
        texts = [
            each.error().message() if each.has_error()
            else str([t.as_numpy().tolist() for t in each.output_tensors()])
            for each in found
        ]
        return [response(x(request), parameters={"told": " | ".join(texts)})]
"""


async def told(instance: Instance, asked: InferRequest) -> str:
    ((_, found),) = await answers(instance, asked)
    assert isinstance(found, InferResponse), found
    return str(found.parameters["told"])


async def load_asking(load: Load, others: Others, *, decoupled: bool = False) -> Instance:
    code = ASK.replace("DECOUPLED", str(decoupled))
    return await load(code, infer=others.infer, control=others)


async def test_business_logic_calls_another_model(load: Load) -> None:
    others = Others()
    instance = await load_asking(load, others)
    asking = asyncio.ensure_future(told(instance, request(1, 2)))
    await soon(others.asked.wait())
    (asked,) = others.requests
    assert asked.model == "other"
    assert asked.inputs[0].array().tolist() == [1, 2]
    answer = array_tensor("y", Datatype.FP32, np.array([7], np.float32))
    others.streams[0].put(InferResponse(outputs=(answer,), final=True))
    assert await soon(asking) == "[[7.0]]"


async def test_business_logic_reads_all_answers_of_a_decoupled_model(load: Load) -> None:
    others = Others(decoupled=True)
    instance = await load_asking(load, others, decoupled=True)
    asking = asyncio.ensure_future(told(instance, request(1)))
    await soon(others.asked.wait())
    for number in range(3):
        answer = array_tensor("y", Datatype.FP32, np.array([number], np.float32))
        others.streams[0].put(InferResponse(outputs=(answer,)))
    others.streams[0].end()
    assert await soon(asking) == "[[0.0]] | [[1.0]] | [[2.0]] | []"


async def test_failures_of_other_models_are_responses(load: Load) -> None:
    others = Others()
    instance = await load_asking(load, others)
    asking = asyncio.ensure_future(told(instance, request(1)))
    await soon(others.asked.wait())
    others.streams[0].fail(InferenceError(Code.NOT_FOUND, "nothing there"))
    assert await soon(asking) == "nothing there"


async def test_failures_of_other_models_keep_their_codes(load: Load) -> None:
    others = Others(decoupled=True)
    code = ASK.replace("DECOUPLED", "True").replace(".error().message()", ".error().code().name")
    instance = await load(code, infer=others.infer, control=others)
    asking = asyncio.ensure_future(told(instance, request(1)))
    await soon(others.asked.wait())
    others.streams[0].put(InferResponse(error=InferenceError(Code.UNSUPPORTED, "not this")))
    others.streams[0].fail(InferenceError(Code.NOT_FOUND, "nothing there"))
    assert await soon(asking) == "UNSUPPORTED | NOT_FOUND"


UNFORESEEN = "request to model 'other' failed unexpectedly; the server's log says why"


async def test_an_unforeseen_exception_answers_the_calling_model(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    others = Others()

    def refuse(_: InferRequest) -> ResponseStream:
        raise RuntimeError("unforeseen")

    instance = await load(ASK.replace("DECOUPLED", "False"), infer=refuse, control=others)
    assert await told(instance, request(1)) == UNFORESEEN
    assert [each.exc_info[1].args for each in caplog.records if each.exc_info] == [("unforeseen",)]


async def test_an_unforeseen_exception_in_an_answer_reaches_the_model_that_asks(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    others = Others()
    instance = await load_asking(load, others)
    asking = asyncio.ensure_future(told(instance, request(1)))
    await soon(others.asked.wait())
    odd = Tensor("y", Datatype.FP32, (1,), None)  # type: ignore[arg-type]
    others.streams[0].put(InferResponse(outputs=(odd,), final=True))
    assert await soon(asking) == UNFORESEEN
    assert len([each for each in caplog.records if each.exc_info]) == 1


async def test_an_unforeseen_exception_of_a_load_answers_the_model_that_asks(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Others):
        async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
            raise RuntimeError("unforeseen")

    code = """
    def execute(self, requests):
        try:
            pb_utils.load_model("other")
        except pb_utils.TritonModelException as error:
            return [response(x(requests[0]), parameters={"told": str(error)})]
"""
    others = Odd()
    instance = await load(code, infer=others.infer, control=others)
    assert "failed unexpectedly" in await told(instance, request(1))
    assert len([each for each in caplog.records if each.exc_info]) == 1


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            {"ready": False},
            "Failed for execute the inference request. Model 'other' is not ready.",
        ),
        (
            {"decoupled": True},
            "Model other is using the decoupled. The current BLS request call doesn't support "
            "models using the decoupled transaction policy. Please use 'decoupled=True' argument "
            "to the 'exec' or 'async_exec' calls for decoupled models.'",
        ),
    ],
)
async def test_models_that_cannot_be_asked_are_refused_with_tritons_texts(
    load: Load, others: dict[str, bool], text: str
) -> None:
    instance = await load_asking(load, Others(**others))
    found = await told(instance, request(1))
    assert found == f"Model other - Error when running inference: {text}"


async def test_calls_of_a_worker_end_with_it(load: Load) -> None:
    others = Others()
    instance = await load_asking(load, others)
    stream = instance.execute([request(1)])
    asking = asyncio.ensure_future(anext(stream))
    await soon(others.asked.wait())
    await soon(instance.close())
    await settle()
    assert others.streams[0].cancelled
    assert isinstance((await soon(asking))[1], InferenceError)


async def test_a_model_loads_and_unloads_others(load: Load) -> None:
    others = Others()
    code = """
    def execute(self, requests):
        pb_utils.load_model("other", config="{}", files={"file:1/a": b"abc", "file:1/b": b""})
        pb_utils.unload_model("other", unload_dependents=True)
        try:
            pb_utils.load_model("bad")
        except pb_utils.TritonModelException as error:
            found = [str(error), str(pb_utils.is_model_ready("other"))]
        return [response(x(requests[0]), parameters={"told": " | ".join(found)})]
"""
    instance = await load(code, infer=others.infer, control=others)
    assert await told(instance, request(1)) == (
        "Failed to load model: Failed to process the request for model 'm_0_0', message: failed to "
        "load 'bad' | True"
    )
    assert others.loads == [
        ("other", "{}", {"file:1/a": b"abc", "file:1/b": b""}),
        ("other", "unload True", {}),
        ("bad", "", {}),
    ]


METERED = """
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="things", description="How many", kind=pb_utils.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={"of": "all"})

    def execute(self, requests):
        self.metric.increment(float(x(requests[0])[0]))
        told = str(self.metric.value())
        return [response(x(requests[0]), parameters={"told": told})]
"""


def samples(instances: Sequence[Instance]) -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for instance in instances
        for metric in instance.metrics()
        for sample in metric.samples
    ]


async def test_instances_share_a_metric_which_is_shown_once(load: Load) -> None:
    instances = [await load(METERED, name=f"m_0_{number}") for number in range(2)]
    assert await told(instances[0], request(2)) == "2.0"
    assert await told(instances[1], request(3)) == "5.0"
    assert samples(instances) == [("things", {"of": "all"}, 5.0)]
    await soon(instances[0].close())
    assert samples(instances) == [("things", {"of": "all"}, 5.0)]


async def test_a_line_of_a_model_is_logged_at_its_file_and_line(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.python")
    instance = await load("""
    def execute(self, requests):
        pb_utils.Logger.log_warn("careful")
        return [response(x(requests[0]))]
""")
    await answers(instance, request(1))
    (record,) = [each for each in caplog.records if each.getMessage() == "careful"]
    assert record.levelno == logging.WARNING
    assert record.filename == "model.py"
    assert record.lineno > 1


COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        pass
"""


async def test_a_model_completes_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, COMPLETES)
    config = ModelConfig(name="m", backend="python")
    found = await soon(asyncio.to_thread(PythonBackend().complete, config, folder))
    assert found.max_batch_size == 8
    assert [each.name for each in found.output] == ["y"]


async def test_a_model_that_completes_nothing_keeps_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, TWICE)
    assert await soon(asyncio.to_thread(PythonBackend().complete, CONFIG, folder)) == CONFIG


async def test_completing_a_config_may_not_take_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPLETE_SECS", 0.5)
    folder = write(tmp_path, COMPLETES.replace("return config", "time.sleep(600)"))
    config = ModelConfig(name="m", backend="python")
    with pytest.raises(InferenceError, match=r"did not return within 0\.5 s"):
        await soon(asyncio.to_thread(PythonBackend().complete, config, folder))


async def test_initialize_gets_tritons_arguments(load: Load) -> None:
    instance = await load(f"""
    def initialize(self, args):
        self.args = args
{ASK.split("        found")[0]}
        return [response(x(request), parameters={{"told": json.dumps(self.args)}})]
""")
    found = await told(instance, request(1))
    for text in (
        '"model_instance_name": "m_0_0"',
        '"model_instance_kind": "AUTO"',
        '"model_instance_device_id": "0"',
        '"model_version": "1"',
        '"model_name": "m"',
    ):
        assert text in found


async def test_a_worker_that_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, TWICE)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(module, "interpreter", always(WorkerEnvironment(python=python)))
    backend = PythonBackend()
    backend.settings = {"stub-timeout-seconds": "1"}
    context = ModelContext(
        config=CONFIG, path=folder, store=tmp_path, infer=nobody, wasted=lambda _: None
    )
    with pytest.raises(InferenceError, match="did not start within 1 s"):
        await soon(backend.load(context))


async def test_an_interpreter_that_cannot_be_started_is_reported_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, TWICE)
    nothing = WorkerEnvironment(python=tmp_path / "nothing")
    monkeypatch.setattr(module, "interpreter", always(nothing))
    with pytest.raises(InferenceError) as refused:
        await soon(asyncio.to_thread(PythonBackend().complete, CONFIG, folder))
    assert refused.value.message == (
        "the worker of model 'm' cannot be started: No such file or directory"
    )


def always(environment: WorkerEnvironment) -> Callable[..., Awaitable[WorkerEnvironment]]:
    async def found(config: ModelConfig, places: Places) -> WorkerEnvironment:
        return environment

    return found


async def test_a_load_that_is_cancelled_leaves_no_process(load: Load, tmp_path: Path) -> None:
    loading = asyncio.ensure_future(load(SLOW))
    pid = await soon(asyncio.to_thread(written, tmp_path / "m" / "1" / "pid"))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(loading)
    assert pid not in os.listdir("/proc")


SLOW = """
    def initialize(self, args):
        (HERE / "pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


def written(path: Path) -> str:
    """What a worker writes into a file, once it has."""
    wait_until(lambda: path.exists() and bool(path.read_text()), f"{path.name} is written")
    return path.read_text()


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


async def test_initialize_may_have_a_limit_of_time(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REMIND_SECS", 0.1)
    config = replace(CONFIG, parameters={"initialize_timeout_secs": "0.5"})
    with pytest.raises(InferenceError, match=r"'m_0_0' did not initialize within 0.5 s"):
        await load("    def initialize(self, args):\n        time.sleep(600)\n", config)
    assert "model still initializing" in caplog.text
