"""Calls of Python models to the server: other models, metrics and log lines."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from gateway.backend import Instance
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, SequenceTag
from gateway.policy.caller import Caller, tenant_of
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor, array_tensor
from tests.backends.python.loading import (
    ASK,
    Load,
    Others,
    answers,
    request,
    soon,
    told,
)
from tests.builders import settle


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


# A model that calls another one for its requests, or for the one whose trace it passes.
CALLS = """
    def execute(self, requests):
        pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=[requests[0].inputs()[0]],
            correlation_id=7, trace=TRACE,
        ).exec()
        return [response(x(each)) for each in requests]
"""
CALLER, OF_SAME, OF_OTHER = (Caller(tenant=tenant, key_id="k") for tenant in "aab")


@pytest.mark.parametrize(
    ("trace", "callers", "tenant"),
    [
        ("None", [CALLER], "a"),
        ("None", [CALLER, OF_SAME], "a"),
        ("None", [CALLER, OF_OTHER], ""),
        ("requests[1].trace()", [CALLER, OF_OTHER], "b"),
        ("None", [None], ""),
    ],
    ids=["alone", "of one tenant", "of two tenants", "traced", "without keys"],
)
async def test_calls_of_a_model_are_of_the_tenant_of_its_requests(
    load: Load, trace: str, callers: Sequence[Caller | None], tenant: str
) -> None:
    others = Others()
    instance = await load(CALLS.replace("TRACE", trace), infer=others.infer, control=others)
    given = [request(1, caller=each) for each in callers]
    asking = asyncio.ensure_future(answers(instance, *given))
    await soon(others.asked.wait())
    (asked,) = others.requests
    assert tenant_of(asked.caller) == tenant
    assert asked.sequence == SequenceTag(7, tenant=tenant)
    others.streams[0].end()
    assert len(await soon(asking)) == len(callers)


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
        for metric in instance.metrics
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
