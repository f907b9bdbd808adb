"""The metric of refusals, on servers without limits of tenants and without deadlines."""

from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError, RetryLater
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from tests.builders import TEXT, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import plane, samples, values
from tests.gateway.ensembles.chains import chain

NARROW = replace(TEXT, parameters={"max_in_flight": "1"})


async def test_a_model_without_room_counts_its_refusals(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance, config=NARROW))
    with dataplane.infer(text_request()) as stream:
        assert samples(dataplane) == []
        for _ in range(3):
            with pytest.raises(RetryLater):
                dataplane.infer(text_request())
        (await instance.begun()).finish("end")
        assert await soon(read_all(stream)) == ["end"]
    assert samples(dataplane) == [({"model": "text", "version": "1", "reason": "overloaded"}, 3)]
    assert dataplane.admission is None


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (RetryLater("no memory to wake it"), 1),
        (InferenceError(Code.UNAVAILABLE, "the engine has stopped"), 0),
        (InferenceError(Code.INTERNAL, "a defect"), 0),
    ],
)
async def test_an_accepted_request_that_is_refused_later_counts_and_no_other_error_does(
    serve: Serve, error: InferenceError, count: int
) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    with dataplane.infer(text_request()) as stream:
        (await instance.begun()).answer(error)
        with pytest.raises(InferenceError):
            await soon(read_all(stream))
    assert values(dataplane).get("refused_total", 0) == count


@pytest.mark.parametrize("refuses", ["a", "b"])
async def test_a_step_of_an_ensemble_that_is_refused_counts_for_its_model(
    serve: Serve, refuses: str
) -> None:
    ensemble = chain(serve)
    dataplane = plane(ensemble.model, *ensemble.models.values())
    ensemble.models[refuses].instances.able = False
    with dataplane.infer(text_request(model="e")) as stream:
        if refuses == "b":
            (await ensemble["a"].begun()).finish("m")
        with pytest.raises(InferenceError, match=f"'{refuses}' is unavailable"):
            await soon(read_all(stream))
    assert samples(dataplane) == [({"model": refuses, "version": "1", "reason": "overloaded"}, 1)]


async def test_a_refused_request_that_a_model_makes_counts_for_the_model_that_refuses_it(
    serve: Serve,
) -> None:
    """So does `max_in_flight` hold for it, as for one of a client."""
    instance = ScriptedInstance()
    dataplane = plane(serve(instance, config=NARROW))
    with dataplane.call(text_request()) as stream:
        with pytest.raises(RetryLater):
            dataplane.call(text_request())
        (await instance.begun()).finish("end")
        assert await soon(read_all(stream)) == ["end"]
    assert samples(dataplane) == [({"model": "text", "version": "1", "reason": "overloaded"}, 1)]


async def test_each_version_of_a_model_has_its_own_count(serve: Serve) -> None:
    """An unloaded version takes its own with it, and no other count falls."""
    models = [serve(ScriptedInstance()), serve(ScriptedInstance(), config=replace(TEXT, name="b"))]
    models.append(Model(TEXT, 2, ModelStatistics(), ()))
    for each in models:
        each.statistics.refuse(RetryLater("full"))
    found = [
        ({"model": name, "version": version, "reason": "overloaded"}, 1)
        for name, version in (("b", "1"), ("text", "1"), ("text", "2"))
    ]
    dataplane = plane(*models)
    assert samples(dataplane) == found
