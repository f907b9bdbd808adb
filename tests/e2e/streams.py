"""Streams of a real engine: one heard to its end by NVIDIA's client, many at once, or left."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc

from tests.conformance.clients import tensor
from tests.e2e.figures import (
    A_FEW_TOKENS,
    DROPPED_SECS,
    GENERATED,
    IN_FLIGHT,
    WASTED,
    changes,
    under_way,
    wait_at_rest,
)
from tests.e2e.llama import ANSWER_SECS, Llama
from tests.leaving import WAYS, Moment, Question, Way, noticed
from tests.raw import Connection
from tests.rpc import StreamRpc, connected
from tests.serving import Serving

STREAM = tensor("stream", "BOOL", np.array([True]))


@dataclass(frozen=True, slots=True)
class Heard:
    """The results and errors of a stream, in the order they came."""

    results: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    def add(self, result: Any, error: Any) -> None:
        """Take what the client reports."""
        if error is None:
            self.results.append(result)
        else:
            self.errors.append(error)

    @property
    def text(self) -> str:
        """The text of one sequence."""
        return "".join(result.as_numpy("text_output")[0].decode() for result in self.results)

    @property
    def finals(self) -> list[bool]:
        """The final flag of each response."""
        messages = (result.get_response() for result in self.results)
        return [message.parameters["triton_final_response"].bool_param for message in messages]

    @property
    def ids(self) -> set[str]:
        """The ids of the responses."""
        return {result.get_response().id for result in self.results}


def hear(
    server: Serving,
    *inputs: Any,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    model: str = "llama",
) -> Heard:
    """Ask, and listen to the end of the stream."""
    heard = Heard()
    with closing(tritonclient.grpc.InferenceServerClient(server.grpc)) as client:
        client.start_stream(heard.add, stream_timeout=ANSWER_SECS)
        client.async_stream_infer(
            model, list(inputs), request_id=request_id, parameters=dict(parameters or {})
        )
        client.stop_stream()
    return heard


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many clients, each with one stream on a connection of its own."""

    connections: list[Connection] = field(default_factory=list)
    rpcs: list[StreamRpc] = field(default_factory=list)

    def leave(self) -> None:
        """All at once."""
        for connection in self.connections:
            connection.close()
        for rpc in self.rpcs:
            rpc.cancel()


@contextmanager
def crowd(server: Serving, question: Question, count: int) -> Iterator[Crowd]:
    """Clients on both wires, whose requests the server has; they disconnect after the block."""
    found = Crowd()
    with ExitStack() as stack:
        stack.callback(found.leave)
        for _ in range(count // 2):
            found.connections.append(Connection(server.ports["http"]))
            found.connections[-1].ask("/v2/models/llama/generate_stream", question.body)
            found.rpcs.append(StreamRpc(stack.enter_context(connected(server.grpc))))
            found.rpcs[-1].ask(question.message)
        server.wait_metric(IN_FLIGHT, "llama", count)
        yield found


def ways(*moments: Moment) -> list[Way]:
    """The ways to leave a model that is decoupled: it answers no unary gRPC request."""
    return [way for way in WAYS if way.moment in moments and not way.unary]


@contextmanager
def forgotten(
    server: Serving, llama: Llama, clients: int = 1, *, stalled: bool = False
) -> Iterator[None]:
    """In this block `clients` clients disconnect; soon after it only their count remains.

    `stalled` ones have read nothing for the send timeout: what the engine made in it is wasted.
    """
    with changes(server) as change:
        with noticed(server, "llama", DROPPED_SECS, canceled=clients):
            yield
        wait_at_rest(server)
        llama.expect_answer()
        # The engine's numbers are those of its last step: it has made one since they left.
        assert not under_way(server)
    assert change["nv_inference_request_failure"] == clients
    most = change.get(GENERATED, 0) if stalled else clients * A_FEW_TOKENS
    assert 0 <= change[WASTED] <= most, f"{change[WASTED]} tokens wasted, at most {most}"
