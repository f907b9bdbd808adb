"""Clients of diverted streams of the real engine that read slowly.

Their server has the default send timeout: the short one of the other server would drop them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.doors import COMPLETIONS, GENERATE, Door, message, texts
from tests.e2e.figures import GENERATED, IN_FLIGHT, diverted, figures, wait_generated
from tests.e2e.llama import ENDLESS
from tests.raw import Connection
from tests.rpc import connected, streaming
from tests.serving import WAIT_SECS, Serving, wait_until

TEST_SECS = 240
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(TEST_SECS),
    pytest.mark.own_models("the queue"),
]

FEW_TOKENS = 24
QUEUED = 64
"""The limit of unread responses of a request."""
SMALL_BUFFER = 4096
SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
"""The least, default and largest size of the buffer of a connection."""
OUTBOX_BYTES = 64 << 20
"""The limit of queued responses of a ModelStreamInfer."""
A_FEW = 4
"""Outputs of a stream that vLLM's handlers get, or that merge on a busy machine."""
OTHERS = 4


@contextmanager
def reads_a_byte_a_second(server: Serving, door: Door, request_id: str) -> Iterator[None]:
    """A client of an endless stream of events; it disconnects after the block."""
    read, ended, began = bytearray(), threading.Event(), time.monotonic()
    with Connection(server.ports["http"], SMALL_BUFFER) as client:
        if door is GENERATE:
            client.ask(door.path, {**door.body(**ENDLESS), "id": request_id})
        else:
            client.ask(door.path, door.body(**ENDLESS), f"X-Request-Id: {request_id}")

        def read_slowly() -> None:
            while not ended.is_set():
                read.extend(client.socket.recv(1))
                ended.wait(1)

        thread = threading.Thread(target=read_slowly)
        thread.start()
        try:
            wait_until(lambda: bool(read), "the stream has begun")
            yield
        finally:
            ended.set()
            thread.join(WAIT_SECS)
    assert len(read) <= 1 + time.monotonic() - began


@contextmanager
def reads_one_message(server: Serving, request_id: str) -> Iterator[None]:
    """A client of an endless ModelStreamInfer; it disconnects after the block."""
    with connected(server.grpc) as stub, streaming(stub, timeout=TEST_SECS) as rpc:
        rpc.ask(message(request_id=request_id, **ENDLESS))
        assert not rpc.answer().error_message
        yield


SLOW = {
    "generate_stream": (partial(reads_a_byte_a_second, door=GENERATE), 400_000, 0),
    "completions": (partial(reads_a_byte_a_second, door=COMPLETIONS), 60_000, 0),
    "ModelStreamInfer": (reads_one_message, 2_000_000, OUTBOX_BYTES),
}
"""Clients that read slowly, the bytes of an id that each response repeats, and those of a queue."""


@pytest.mark.parametrize(
    ("slow", "id_bytes", "queue_bytes"),
    [
        pytest.param(*slow, marks=pytest.mark.release if name == "completions" else (), id=name)
        for name, slow in SLOW.items()
    ],
)
def test_a_client_that_reads_slowly_holds_back_only_itself(
    other_server: Serving,
    slow: Callable[..., AbstractContextManager[None]],
    id_bytes: int,
    queue_bytes: int,
) -> None:
    """Its text is merged in the engine's client: no more outputs than fit into buffers are put."""
    server, send_buffer_bytes = other_server, int(SEND_BUFFERS.read_text().split()[2])
    most = QUEUED + (queue_bytes + send_buffer_bytes) // id_bytes + A_FEW
    before, generated = diverted(server), figures(server)[GENERATED]
    with slow(server, request_id="x" * id_bytes):
        found = [list(texts(body)) for body in answers(server)]
        others = diverted(server) - before
        wanted = generated + most + 2 * A_FEW + OTHERS * FEW_TOKENS
        wait_generated(server, wanted)
        assert server.metric(IN_FLIGHT, "llama") == 1
    server.wait_metric(IN_FLIGHT, "llama", 0)
    assert len({"".join(each) for each in found}) == 1
    assert all(len(each) >= FEW_TOKENS - A_FEW for each in found)
    assert others >= OTHERS * (FEW_TOKENS - A_FEW)
    assert A_FEW < diverted(server) - before - others <= most


def answers(server: Serving) -> list[bytes]:
    """The whole streams of some clients at the same time."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Connection(server.ports["http"])) for _ in range(OTHERS)]
        for number, client in enumerate(clients):
            door = (GENERATE, COMPLETIONS)[number % 2]
            client.ask(door.path, door.body(max_tokens=FEW_TOKENS, temperature=0, ignore_eos=True))
        return [client.answer().body for client in clients]
