"""Texts of a replica that come in one frame, as a router passes them on."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.fleet.choice import ANY_REQUEST
from gateway.fleet.handshake import FleetKind
from gateway.messages import InferResponse, Usage
from gateway.processes.channel import Frame, Receiver, number, read_number
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import LARGE_BYTES, LargeData, write_response
from gateway.processes.text_runs import take_run
from gateway.processes.windows import REPORTED_BYTES
from gateway.stream import DEFAULT_LIMIT
from gateway.tensor import Datatype, Tensor
from tests.builders import TEXT, settle, text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.large_ends import connecting
from tests.gateway.fleet.losing import KEY, LLM, generation, read, taken
from tests.gateway.fleet.routing import Routed, routing
from tests.gateway.fleet.test_continuation import chat, chunk, said

CHAT = replace(
    LLM,
    input=tuple(replace(TEXT.input[0], name=f"openai_{each}") for each in ("request", "endpoint")),
    output=(replace(TEXT.output[0], name="openai_response"),),
)


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


class Heard(Receiver):
    """Keeps the frames of a call at its replica."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def hear(self, frame: Frame) -> None:
        self.frames.append(frame)

    def lose(self) -> None:
        """The test ends."""


async def test_texts_that_wait_for_a_slow_client_keep_their_order(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    heard, written = Heard(), list[bytes]()

    def write(_: str, elements: Sequence[bytes]) -> bool:
        written.extend(elements)
        return True

    every = [str(each).zfill(1000) for each in range(2 * DEFAULT_LIMIT)]
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.links[-1].join(call, heard)
        for each in every:
            send_run(found, call, [text_response(each, tokens=1)])
        await until(lambda: stream.full)
        await settle()  # the rest waits
        first = stream.take()
        assert first is not None
        assert len(first) == DEFAULT_LIMIT
        stream.write_texts = write
        send_run(found, call, [text_response("late", tokens=1)])
        await until(lambda: len(written) == 1 + DEFAULT_LIMIT)
        found.respond(call, text_response("", tokens=1, final=True))
        await read(stream, 1)
    assert [*texts(first), *(each.decode() for each in written)] == [*every, "late"]
    assert sum(read_number(each.payload) for each in heard.frames) >= 2 * REPORTED_BYTES


async def test_no_text_overtakes_a_response_with_large_tensors(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    numbers = Tensor("n", Datatype.UINT8, (LARGE_BYTES + 1,), bytes(LARGE_BYTES + 1))
    large: list[LargeData] = []
    message = write_response(InferResponse(outputs=(numbers,)), large)
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.respond(call, text_response("a", tokens=1))
        await read(stream, 1)
        found.links[-1].send(FleetKind.LARGE_DATA, call, number(1) + message)
        send_run(found, call, [text_response("b", tokens=1)])
        await settle()
        found.bulk.send(call, memoryview(bytes(numbers.raw())))
        first, second = await read(stream, 2)
        assert (first.outputs[0].name, texts([second])) == ("n", ["b"])
        found.respond(call, text_response("", tokens=1, final=True))
        await read(stream, 1)


async def test_texts_are_acknowledged_once_they_are_passed_on(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    heard, text = Heard(), text_response("x" * 1000, tokens=1)
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.links[-1].join(call, heard)
        found.respond(call, text_response("a", tokens=1))
        await read(stream, 1)
        for _ in range(REPORTED_BYTES // 1000):
            send_run(found, call, [text])
            await read(stream, 1)
        await until(lambda: bool(heard.frames))
        found.respond(call, text_response("b", tokens=1, final=True))
        await read(stream, 1)
    assert [each.kind for each in heard.frames] == [InferenceKind.TAKEN]


async def test_malformed_texts_end_the_request_with_an_error(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.respond(call, text_response("a", tokens=1))
        await read(stream, 1)
        found.links[-1].send(InferenceKind.TEXTS, call, b"no texts")
        with pytest.raises(InferenceError, match="malformed texts"):
            await read(stream, 1)


async def test_no_texts_are_passed_on_before_the_rest_of_a_run() -> None:
    passed: list[bytes] = []
    async with listening() as replica:
        replica.offer(offered(LLM))
        async with connecting(replica.port) as router:
            call = router.call(KEY, replace(generation(), version="1"), lambda: None, ANY_REQUEST)
            await until(lambda: bool(replica.calls))
            call.on_texts = lambda payload: bool(passed.append(payload))
            send_run(replica, replica.calls[0], [of_two_dims("a"), of_two_dims("b")])
            await until(lambda: call.has_unread)
            assert call.take() == of_two_dims("a")
            passed.clear()
            send_run(replica, replica.calls[0], [text_response("c")])
            await settle()
            assert (call.take_texts(), passed) == (False, [])
            assert call.take() == of_two_dims("b")
            assert (call.take_texts(), len(passed)) == (False, 1)
            assert call.take() == text_response("c")
            call.leave()


async def test_texts_of_a_continuation_are_joined_to_those_before_it(tmp_path: Path) -> None:
    asked = replace(chat(max_tokens=9), model="text")
    async with listening() as one, listening() as two:
        for each in (one, two):
            each.offer(offered(CHAT))
        async with routing(tmp_path, one, two) as routed:
            with routed.dataplane.infer(asked) as stream:
                found, call = await taken(one, two)
                found.respond(call, chunk(1, said("a"), id="first"))
                await read(stream, 1)
                found.lose()
                other, call = await taken(one, two)
                other.respond(call, chunk(1, said("b"), id="second"))
                chunks = await read(stream, 1)
                send_run(other, call, [chunk(1, said("c"), id="second")] * 2)
                chunks += await read(stream, 2)
                other.respond(call, replace(chunk(1, said("d", "stop")), final=True))
                chunks += await read(stream, 1)
    assert [orjson.loads(each)["id"] for each in texts(chunks)] == ["first"] * 4
