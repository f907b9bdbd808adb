"""Every disconnect stops the work of the real engine for its client, and for no other."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tritonclient.grpc import service_pb2

from tests.e2e.conftest import MAX_IN_FLIGHT, MAX_RUNNING
from tests.e2e.figures import (
    DROPPED_SECS,
    GENERATED,
    IN_FLIGHT,
    RUNNING,
    WAITING,
    figures,
    wait_at_rest,
    wait_in_engine,
)
from tests.e2e.llama import ANSWER, ENDLESS, FRANCE, Llama, every_engine, streamed
from tests.e2e.streams import crowd, forgotten, ways
from tests.leaving import Moment, Question, Way
from tests.raw import Connection
from tests.serving import Serving, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

GENERATE = "/v2/models/llama/generate"
STALLED_SECS = 30.0

STORY = streamed("Once upon a time", **ENDLESS)


@every_engine
@pytest.mark.parametrize("way", ways(Moment.BETWEEN_ANSWERS), ids=str)
def test_leaving_in_the_middle_of_a_stream(server: Serving, llama: Llama, way: Way) -> None:
    with forgotten(server, llama), way.leave(server, STORY):
        wait_at_rest(server)


@pytest.mark.own_models("the queue")
@every_engine
@pytest.mark.parametrize("way", ways(Moment.BEFORE_THE_FIRST_ANSWER), ids=str)
def test_leaving_the_engines_queue(server: Serving, llama: Llama, way: Way) -> None:
    with forgotten(server, llama, MAX_RUNNING + 1), full_engine(server) as others:
        with way.leave(server, STORY):
            server.wait_metric(IN_FLIGHT, "llama", MAX_RUNNING, DROPPED_SECS)
            wait_in_engine(server, lambda: figures(server)[WAITING] == 0, "no request waits")
        assert all(other.chunk() for other in others)
        assert figures(server)[RUNNING] == MAX_RUNNING


@pytest.mark.own_models("the queue")
@every_engine
def test_leaving_after_a_wait_in_the_engines_queue(server: Serving, llama: Llama) -> None:
    with forgotten(server, llama, MAX_RUNNING + 1), full_engine(server):
        with Connection(server.ports["http"]) as client:
            client.ask(GENERATE, STORY.body)
            wait_until(lambda: figures(server)[WAITING] == 1, "it waits in the engine")
        wait_in_engine(server, lambda: figures(server)[WAITING] == 0, "no request waits")


def test_leaving_while_a_whole_answer_is_made(server: Serving, llama: Llama) -> None:
    before = figures(server)[GENERATED]
    with forgotten(server, llama), Connection(server.ports["http"]) as client:
        client.ask(GENERATE, {**STORY.body, "stream": False})
        wait_until(lambda: figures(server)[GENERATED] > before, "tokens are made")


@every_engine
def test_the_disconnect_of_one_of_two_clients_does_not_disturb_the_other(
    server: Serving, llama: Llama
) -> None:
    rambling = {**FRANCE, "max_tokens": 32, "ignore_eos": True}
    with (
        forgotten(server, llama),
        Connection(server.ports["http"]) as leaver,
        Connection(server.ports["http"]) as bystander,
    ):
        leaver.ask(f"{GENERATE}_stream", STORY.body)
        leaver.head()
        bystander.ask(GENERATE, rambling)
        wait_until(lambda: figures(server)[RUNNING] == 2, "both are under way")
        leaver.close()
        assert bystander.answer().json["text_output"].startswith(ANSWER)


@every_engine
@pytest.mark.parametrize("way", ways(Moment.WHEN_BUFFERS_ARE_FULL), ids=str)
def test_a_reader_that_stops_reading_is_gone_after_the_send_timeout(
    server: Serving, llama: Llama, way: Way
) -> None:
    with forgotten(server, llama, stalled=True), way.leave(server, long_id(STORY)):
        server.wait_metric(IN_FLIGHT, "llama", 0, STALLED_SECS)
        wait_at_rest(server)


def long_id(question: Question) -> Question:
    """The same with an id so long that its answers, which repeat it, soon fill every buffer."""
    message = service_pb2.ModelInferRequest()
    message.CopyFrom(question.message)
    message.id = "x" * 100_000
    return Question({**question.body, "id": message.id}, message)


@pytest.mark.own_models("the queue")
@every_engine
def test_a_hundred_clients_leave_at_once(server: Serving, llama: Llama) -> None:
    with forgotten(server, llama, MAX_IN_FLIGHT):
        with crowd(server, STORY, MAX_IN_FLIGHT) as crowded:
            wait_until(lambda: figures(server)[RUNNING] == MAX_RUNNING, "the engine is full")
            crowded.leave()
        wait_at_rest(server)


@contextmanager
def full_engine(server: Serving) -> Iterator[list[Connection]]:
    """As many streams as the engine runs at once."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Connection(server.ports["http"])) for _ in range(MAX_RUNNING)
        ]
        for client in clients:
            client.ask(f"{GENERATE}_stream", STORY.body)
        for client in clients:
            client.head()
        yield clients
