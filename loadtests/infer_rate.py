"""Small inferences at a steady rate, beside whatever else the server does."""

import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

import orjson

from loadtests.rounds import LoadTestFailed

PATH = "/v2/models/add_sub/infer"
TIMEOUT_SECS = 60.0
BODY = orjson.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)


@dataclass(slots=True)
class Answered:
    """How long each inference took, in seconds from when it was due."""

    took: list[float] = field(default_factory=list)


@contextmanager
def inferring(port: int, per_sec: float) -> Iterator[Answered]:
    """Ask add_sub that often while the block runs; LoadTestFailed if one is refused."""
    answered, stop = Answered(), Event()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(_ask, port, per_sec, answered, stop)
        try:
            yield answered
        finally:
            stop.set()
        asking.result()


def _ask(port: int, per_sec: float, answered: Answered, stop: Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECS)
    due = time.perf_counter()
    while not stop.wait(max(0.0, due - time.perf_counter())):
        connection.request("POST", PATH, BODY)
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise LoadTestFailed(f"add_sub answered {response.status}: {body.decode()}")
        answered.took.append(time.perf_counter() - due)
        due += 1 / per_sec
    connection.close()
