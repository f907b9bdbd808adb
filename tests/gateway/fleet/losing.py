"""Replicas of a model that continues texts, as tests lose them."""

from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream
from tests.builders import DECOUPLED, TEXT, soon, text_request, text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.routing import Routed, calls

KEY = ("text", 1)
LLM = replace(TEXT, backend="vllm", model_transaction_policy=DECOUPLED)
STOPPED = InferenceError(Code.UNAVAILABLE, "the engine has stopped")


def generation(text: str = "a", **parameters: int) -> InferRequest:
    return text_request(text, parameters={"max_tokens": 9} | parameters)


async def taken(*replicas: FakeReplica) -> tuple[FakeReplica, int]:
    """The only replica with a request, and its number there."""
    (found,) = await calls(*replicas)
    return found, found.calls.pop()


async def read(stream: ResponseStream, count: int) -> list[InferResponse]:
    """The next responses of a stream."""
    found: list[InferResponse] = []
    while len(found) < count:
        found += await soon(stream.batch())
    return found


async def lose_after(stream: ResponseStream, text: str, *replicas: FakeReplica) -> FakeReplica:
    """Lose the replica of a request after a text of two tokens; the replica."""
    found, call = await taken(*replicas)
    found.respond(call, text_response(text, tokens=2))
    assert texts(await read(stream, 1)) == [text]
    found.lose()
    return found


async def back(routed: Routed) -> None:
    """Wait until all replicas are connected."""
    await until(lambda: all(each.serves(KEY) for each in routed.router.connections))
