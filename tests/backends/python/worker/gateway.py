"""A worker process for tests, and the gateway's end of what joins it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from backends.python.worker.sluice_worker.protocol import (
    SHARED_FROM_BYTES,
    FrameSplitter,
    IncomingSegments,
    OutgoingSegments,
    ToGateway,
    ToWorker,
    frame,
)

WORKER = Path(__file__).parents[4] / "backends" / "python" / "worker"
WAIT_SECS = 20.0
CONFIG = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 0,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [
        {"name": "y", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "z", "data_type": "TYPE_FP32", "dims": [-1]},
    ],
}
NAMES = {"float32": "FP32", "int32": "INT32", "bool": "BOOL", "uint8": "UINT8"}


class Heard:
    """One message of the worker's: its header without the kind, and its body."""

    def __init__(self, values: list[Any], body: memoryview) -> None:
        self.values = values
        self.body = body


class PlayedGateway:
    """Says what a test wants said, and keeps what the worker says by its kind."""

    def __init__(self, folder: Path, python: Path = Path(sys.executable)) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [pair[1] for pair in pairs]
        self.work, self.control, self._descriptors = (pair[0] for pair in pairs)
        self.process = subprocess.Popen(
            [python, WORKER, *(str(each.fileno()) for each in theirs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[each.fileno() for each in theirs],
            start_new_session=True,
        )
        for each in theirs:
            each.close()
        self._folder = folder
        self.incoming = IncomingSegments(self._descriptors)
        self.outgoing = OutgoingSegments(self._descriptors)
        self._heard: dict[int, SimpleQueue[Heard]] = {kind: SimpleQueue() for kind in ToGateway}
        self._answered_over_work: set[int] = set()
        self.listening = [
            threading.Thread(target=self._listen, args=(each,), daemon=True)
            for each in (self.work, self.control)
        ]
        for each in self.listening:
            each.start()
        self.loaded: dict[str, bool] = {}
        self._executions = self._executed = 0

    # What is said.

    def say(self, kind: ToWorker, *values: Any, buffers: Sequence[bytes] = ()) -> None:
        """A message over the socket that its kind belongs to, or that was asked for."""
        over_work = kind in (
            *(ToWorker.COMPLETE, ToWorker.LOAD, ToWorker.EXECUTE, ToWorker.FINALIZE),
        )
        if kind is ToWorker.INFERRED:
            over_work = values[0] in self._answered_over_work
        target = self.work if over_work else self.control
        target.sendall(frame(json.dumps([kind, *values]).encode(), buffers))

    def load(self, *, decoupled: bool = False, **about: Any) -> Any:
        """Load the model of the folder; what LOADED says, or FAILED."""
        config = {**CONFIG, "model_transaction_policy": {"decoupled": decoupled}}
        args = {
            "model_config": json.dumps({**config, **about.pop("config", {})}),
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0_0",
            "model_instance_device_id": "0",
            "model_repository": str(self._folder),
            "model_version": "1",
            "model_name": "m",
        }
        path = str(self._folder / "1")
        told = {"args": args, "path": path, "backend_path": "", "decoupled": decoupled, **about}
        return self._ask(ToWorker.LOAD, told, ToGateway.LOADED)

    def complete(self, config: dict[str, Any] | None = None) -> Any:
        """Have the config completed: what COMPLETED says, or FAILED."""
        told = {
            "model_config": json.dumps({**CONFIG, **(config or {})}),
            "model_name": "m",
            "path": str(self._folder / "1"),
            "backend_path": "",
        }
        return self._ask(ToWorker.COMPLETE, told, ToGateway.COMPLETED)

    def execute(self, *requests: list[Any], buffers: Sequence[bytes] = ()) -> list[Any]:
        """Have requests executed; error, answers and body of EXECUTED."""
        self.begin(*requests, buffers=buffers)
        return self.executed()

    def begin(self, *requests: list[Any], buffers: Sequence[bytes] = ()) -> None:
        """Have requests executed."""
        self._executions += 1
        self.say(ToWorker.EXECUTE, self._executions, list(requests), buffers=buffers)

    def executed(self) -> list[Any]:
        """Error, answers and body of the next EXECUTED."""
        heard = self.hear(ToGateway.EXECUTED)
        self._executed += 1
        assert heard.values[0] == self._executions
        assert heard.values[3] >= 0
        return [heard.values[1], heard.values[2], heard.body]

    def took(self, executed: int) -> None:
        """Count EXECUTED messages that were read one by one."""
        self._executed += executed

    def failure(self, *requests: list[Any]) -> str:
        """The message that all requests of an execution fail with."""
        error, answers, _ = self.execute(*(requests or (request(1),)))
        assert answers == []
        return str(error[0])

    def place(self, array: Any) -> list[Any]:
        """A tensor `x` in a segment."""
        data = array.tobytes()
        assert len(data) >= SHARED_FROM_BYTES
        segment = self.outgoing.place(memoryview(data))
        return ["x", NAMES[str(array.dtype)], list(array.shape), len(data), segment]

    # What is heard.

    def hear(self, kind: ToGateway) -> Heard:
        """The next message of a kind."""
        return self._heard[kind].get(timeout=WAIT_SECS)

    def _ask(self, kind: ToWorker, told: dict[str, Any], expected: ToGateway) -> Any:
        """Name and values of the answer: of the kind expected, or FAILED."""
        queue: SimpleQueue[tuple[str, list[Any]]] = SimpleQueue()
        for each in (expected, ToGateway.FAILED):
            self._heard[each] = _Naming(each.name, queue)  # type: ignore[assignment]
        self.say(kind, told)
        return queue.get(timeout=WAIT_SECS)

    def forget(self) -> None:
        """Hear no response of those that have been sent so far."""
        self.rest(ToGateway.RESPONSE)

    def rest(self, kind: ToGateway) -> list[list[Any]]:
        """The values of all unread messages of a kind."""
        queue = self._heard[kind]
        return [queue.get().values for _ in range(queue.qsize())]

    def arrays(self, outputs: Sequence[Any], body: memoryview) -> dict[str, Any]:
        """The outputs of a response as arrays, or the elements of BYTES as bytes."""
        found, start = {}, 0
        for name, datatype, shape, size, segment in outputs:
            if segment:
                data = self.incoming.view(segment, size)
            else:
                data, start = body[start : start + size], start + size
            if datatype == "BYTES":
                found[name] = bytes(data)
                continue
            dtype = {each: key for key, each in NAMES.items()}[datatype]
            found[name] = np.frombuffer(data, dtype).reshape(shape)
        return found

    def ping(self) -> None:
        """Wait until what was said over `control` has been heard."""
        self.say(ToWorker.PING, 1)
        assert self.hear(ToGateway.PONG).values == [1]

    @property
    def idle(self) -> bool:
        """Whether all that was begun has been executed."""
        return self._executed == self._executions and self.process.poll() is None

    def close(self) -> None:
        """Go away; the worker ends. One that does not is killed, and AssertionError raised."""
        for each in (self.work, self.control, self._descriptors):
            self.hang_up(each)
        try:
            self.process.wait(WAIT_SECS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError("the worker has not ended with its gateway") from None
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for thread in self.listening:
            thread.join(WAIT_SECS)
        for each in (self.work, self.control, self._descriptors):
            each.close()
        self.outgoing.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @staticmethod
    def hang_up(connection: socket.socket) -> None:
        """Say that nothing more will be said; harmless if the worker was quicker."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def printed(self) -> str:
        """All that the worker has written, once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def _listen(self, source: socket.socket) -> None:
        reader = FrameSplitter()
        while data := source.recv(1 << 18):
            for header, body in reader.feed(data):
                kind, *values = json.loads(header)
                if kind == ToGateway.INFER and values[4]:
                    self._answered_over_work.add(values[0])
                self._heard[kind].put(Heard(values, body))


class _Naming:
    """Puts messages of one kind into a queue that several kinds share."""

    def __init__(self, name: str, queue: "SimpleQueue[tuple[str, list[Any]]]") -> None:
        self._name, self._queue = name, queue

    def put(self, heard: Heard) -> None:
        self._queue.put((self._name, heard.values))


def request(number: int, *inputs: list[Any], **fields: Any) -> list[Any]:
    """A request of a message; without fields it is as plain as can be."""
    found = {
        "model": "m",
        "version": 1,
        "id": "",
        "correlation": None,
        "flags": 0,
        "timeout_us": 0,
        "priority": 0,
        "parameters": {},
        "outputs": [],
        **fields,
    }
    return [number, *found.values(), list(inputs)]


def tensor(*values: float, name: str = "x") -> tuple[list[Any], bytes]:
    """An FP32 input, and its bytes for the body."""
    data = np.array(values, np.float32).tobytes()
    return [name, "FP32", [len(values)], len(data), 0], data


def model(folder: Path, text: str, version: str = "1", name: str = "model.py") -> Path:
    """Write a model.py of this text, which finds pb_utils and numpy; returns the model's folder."""
    (folder / version).mkdir(parents=True, exist_ok=True)
    head = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"
    (folder / version / name).write_text(head + text)
    return folder


@contextmanager
def worker(folder: Path, text: str, **loading: Any) -> Iterator[PlayedGateway]:
    """A worker that has loaded a model.py of this text."""
    gateway = PlayedGateway(model(folder / "m", text))
    try:
        kind, values = gateway.load(**loading)
        assert kind == "LOADED", values
        gateway.loaded = values[0]
        yield gateway
    finally:
        gateway.close()


PROBE = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = {}

    def execute(self, requests):
        code = pb_utils.get_input_tensor_by_name(requests[0], "code").as_numpy()[0].decode()
        lines = "\\n".join("    " + line for line in code.splitlines())
        found = {}
        exec(f"def run(self, requests):\\n{lines}", globals(), found)
        return found["run"](self, requests)


def caught(call, *arguments, **named):
    try:
        return repr(call(*arguments, **named))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def texts(*values):
    array = np.array(values, dtype=object)
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", array)])


def numbers(*values):
    array = np.array(values, dtype=np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", array)])
"""
"""A model that runs the code it is sent, with two short ways to make a response."""


def code(text: str) -> tuple[list[Any], bytes]:
    """The input of a probe, and its bytes for the body."""
    data = text.encode()
    data = len(data).to_bytes(4, "little") + data
    return ["code", "BYTES", [1], len(data), 0], data


def probe(gateway: PlayedGateway, number: int, text: str, **fields: Any) -> list[Any]:
    """Error, answers and body of what a probe did with a request of that number."""
    header, data = code(text)
    return gateway.execute(request(number, header, **fields), buffers=[data])


def told(gateway: PlayedGateway, number: int, text: str, **fields: Any) -> list[str]:
    """The texts with which a probe answered."""
    error, answers, body = probe(gateway, number, text, **fields)
    assert error is None, error
    data = gateway.arrays(answers[0][1][0], body)["y"]
    found = []
    while data:
        size = int.from_bytes(data[:4], "little")
        found.append(data[4 : 4 + size].decode())
        data = data[4 + size :]
    return found
