"""The waits of a client next to one that does harm, measured in a process of its own."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.rpc import Metadata, connected
from tests.serving import WAIT_SECS

PAUSE_SECS = 0.004


@dataclass(frozen=True, slots=True)
class Served:
    """The service of the neighbour since the last look: of its two clients the worse."""

    answers: int
    p99_secs: float
    errors: list[str]


class Neighbour:
    """A unary client and a stream, each on a connection of its own, and always waiting."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def served(self) -> Served:
        """Its service since the last look; an answer comes first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Served(**json.loads(self._process.stdout.readline()))


@contextmanager
def neighbour(target: str, key: str = "") -> Iterator[Neighbour]:
    """A neighbour for the length of the block, with an API key, which has been answered once."""
    command = [sys.executable, "-m", "tests.conformance.neighbour", target, key]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            found = Neighbour(process)
            found.served()
            yield found
        finally:
            process.kill()


class _Log:
    """The times of the answers that one client has waited for."""

    def __init__(self) -> None:
        self._secs: list[float] = []
        self._errors: list[str] = []
        self._answered = threading.Event()

    def keep(self, ask: Callable[[], object]) -> None:
        """Ask for ever."""
        while True:
            began = time.perf_counter()
            try:
                ask()
            except (grpc.RpcError, AssertionError) as error:
                self._errors.append(repr(error)[:300])
            self._secs.append(time.perf_counter() - began)
            self._answered.set()
            time.sleep(PAUSE_SECS)

    def take(self) -> tuple[list[float], list[str]]:
        """The seconds and the errors since the last time, with one more answer."""
        self._answered.clear()
        self._answered.wait(WAIT_SECS)
        secs, self._secs = self._secs, []
        errors, self._errors = self._errors, []
        return secs, errors


def _small() -> Any:
    found = service_pb2.ModelInferRequest(model_name="sixteen", raw_input_contents=[bytes(64)])
    found.inputs.add(name="INPUT", datatype="FP32", shape=[16])
    return found


def _one() -> Any:
    found = service_pb2.ModelInferRequest(model_name="repeat")
    text = found.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"x")
    count = found.inputs.add(name="n", datatype="INT32", shape=[1])
    count.contents.int_contents.append(1)
    return found


class _Stream:
    """One stream, on which a request waits for its answer."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._answers = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata)

    def ask(self) -> None:
        """One answer."""
        self._requests.put(_one())
        assert not next(self._answers).error_message


def _main(target: str, key: str) -> None:
    metadata = [("x-api-key", key)] if key else []
    with connected(target) as one, connected(target) as other:
        logs = _Log(), _Log()
        unary = partial(one.ModelInfer, _small(), timeout=WAIT_SECS, metadata=metadata)
        asks = unary, _Stream(other, metadata).ask
        for log, ask in zip(logs, asks, strict=True):
            threading.Thread(target=log.keep, args=(ask,), daemon=True).start()
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(_told([log.take() for log in logs])) + "\n")
            sys.stdout.flush()


def _told(found: Sequence[tuple[list[float], list[str]]]) -> dict[str, Any]:
    errors = [error for _, errors in found for error in errors]
    p99 = [sorted(secs)[int(len(secs) * 0.99)] for secs, _ in found if secs]
    answers = min(len(secs) for secs, _ in found)
    return {"answers": answers, "p99_secs": max(p99, default=0.0), "errors": errors[:3]}


if __name__ == "__main__":
    _main(*sys.argv[1:])
