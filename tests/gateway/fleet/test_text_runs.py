"""Texts of a replica that come in one frame, as a router passes them on."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.messages import InferResponse, Usage
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.text_runs import take_run
from tests.builders import text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.losing import LLM, generation, read, taken
from tests.gateway.fleet.routing import Routed


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


def send_run(replica: FakeReplica, call: int, responses: Sequence[InferResponse]) -> None:
    """Send texts as one frame."""
    run = take_run(deque(responses))
    assert run is not None
    replica.links[-1].send(InferenceKind.TEXTS, call, run)


def of_two_dims(text: str) -> InferResponse:
    response = text_response(text, tokens=1)
    return replace(response, outputs=(replace(response.outputs[0], shape=(1, 1)),))


@pytest.mark.parametrize("has_writer", [False, True], ids=["read", "written"])
async def test_texts_of_a_frame_reach_the_client_as_the_model_made_them(
    routed: Routed, replicas: list[FakeReplica], has_writer: bool
) -> None:
    sent = [text_response("b", tokens=2), text_response("c"), text_response("", tokens=0)]
    dims = [of_two_dims("d"), of_two_dims("e")]
    written: list[tuple[str, Sequence[bytes]]] = []

    def write(name: str, elements: Sequence[bytes]) -> bool:
        written.append((name, elements))
        return True

    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        send_run(found, call, [text_response("a", tokens=1)])
        first = await read(stream, 1)
        if has_writer:
            stream.listen(lambda: None, write)
        send_run(found, call, sent)
        if has_writer:
            await until(lambda: bool(written))
        send_run(found, call, dims)
        found.respond(call, text_response("f", tokens=1, final=True))
        rest = await read(stream, 3 if has_writer else 6)
    plain = sent if not has_writer else []
    assert [*first, *rest][: len(plain) + 3] == [text_response("a", tokens=1), *plain, *dims]
    assert written == ([("text_output", (b"b", b"c", b""))] if has_writer else [])
    (model,) = routed.dataplane.models()
    assert model.statistics.completion_tokens == 6


async def test_a_text_that_came_in_one_frame_is_continued(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.respond(call, text_response("b", tokens=1))
        await read(stream, 1)
        send_run(found, call, [text_response("c", tokens=2), text_response("d", tokens=1)])
        await read(stream, 2)
        found.lose()
        other, call = await taken(*replicas)
        rest = other.requests[call]
        assert (rest.inputs[0].elements(), rest.parameters) == ((b"abcd",), {"max_tokens": 5})
        send_run(other, call, [text_response("e", tokens=1)] * 2)
        other.respond(call, text_response("f", tokens=1, final=True))
        last = await read(stream, 3)
    assert texts(last) == ["e", "e", "f"]
    assert last[0].usage == Usage(completion_tokens=1)
    assert last[-1].parameters == {"continued": 1}
