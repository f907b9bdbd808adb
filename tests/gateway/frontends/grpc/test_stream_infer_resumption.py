"""Parameters of resumable streams on ModelStreamInfer."""

from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.outbox import marked
from gateway.frontends.grpc.recorded_streams import recorded, resumed, resumes
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.recordings import Recordings
from gateway.stream import ResponseStream
from tests.builders import DECOUPLED, TEXT, ScriptedInstance, soon, text_request, text_response
from tests.conftest import Serve

LLM = replace(TEXT, name="llm", model_transaction_policy=DECOUPLED)


def message(model: str = "llm", version: str = "", **parameters: str | int) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(found.parameters[name], kind, value)
    return found


def test_only_a_message_with_a_token_resumes() -> None:
    assert resumes(message(resume="x"))
    assert not resumes(message(resume_after=1))


async def test_resumed_responses_are_numbered_from_the_resumption(serve: Serve) -> None:
    instance, recordings = ScriptedInstance(), Recordings()
    model = serve(instance, config=LLM)
    request = text_request(model="llm")
    with recorded(recordings, message(), request, model, lambda: model.submit(request)) as first:
        execution = await instance.begun()
        execution.answer(replace(text_response("a"), parameters={"score": 1}))
        batch = await soon(first.batch())
        assert [each.parameters for each in marked(first, batch)] == [
            {"score": 1, "sluice_event": 1, "sluice_stream": first.token}
        ]
        execution.answer(text_response("b"))
        batch = await soon(first.batch())
        assert [each.parameters for each in marked(first, batch)] == [{"sluice_event": 2}]
        again = await resumed(recordings, message(resume=first.token, resume_after=1))
        with again:
            batch = await soon(again.batch())
            assert [each.parameters for each in marked(again, batch)] == [
                {"sluice_event": 2, "sluice_stream": first.token}
            ]
        for wrong in (
            message("other", resume=first.token),
            message(version="1", resume=first.token),
        ):
            with pytest.raises(InferenceError, match="there is no such stream"):
                await resumed(recordings, wrong)
        with await resumed(recordings, message(resume=first.token)) as whole:
            assert len(await soon(whole.batch())) == 2
    recordings.drain()


async def test_unrecorded_responses_are_not_numbered() -> None:
    batch = [text_response("a")]
    assert marked(ResponseStream(), batch) is batch


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"resume": 1}, "'resume' parameter, expected string_param"),
        ({"resume": "x", "resume_after": "1"}, "'resume_after' parameter, expected int64_param"),
        ({"resume": "x", "resume_after": -1}, "'resume_after' is -1, expected 0 or more"),
    ],
)
async def test_a_bad_parameter_is_refused(parameters: dict[str, str | int], text: str) -> None:
    with pytest.raises(InferenceError, match=text) as caught:
        await resumed(Recordings(), message(**parameters))
    assert caught.value.code is Code.INVALID_ARG


async def test_a_model_that_is_not_decoupled_has_no_resumable_stream(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    request = text_request()
    with pytest.raises(InferenceError, match="model 'text' is not decoupled") as caught:
        recorded(Recordings(), message("text"), request, model, lambda: model.submit(request))
    assert caught.value.code is Code.INVALID_ARG
