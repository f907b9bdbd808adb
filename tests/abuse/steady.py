"""A steady client: two streams of tokens in a process of its own, and the gaps between tokens.

A gap is the time between two tokens, less the time in which a process of their path was ready to
run and had no processor: that is the delay of the machine, not that of the server.
"""

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from hyperframe.frame import DataFrame

from tests.children import children_of
from tests.http2 import Connection as Http2
from tests.http2 import message, request
from tests.raw import Connection
from tests.serving import Serving, wait_until

TOKEN_SECS = 0.005
TOKENS = 1_000_000
"""More than a test reads."""

FLOOR_SECS = 0.05
"""A gap that no client notices."""

WORST_SECS = 0.25
"""The longest gap: a reader does not see it."""

FEWEST = 150
"""Gaps of each stream in a measurement."""

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
ASKED = {"text_input": "steady", "n": TOKENS, "delay_us": int(TOKEN_SECS * 1e6)}


@dataclass(frozen=True, slots=True)
class Served:
    """The tokens of both streams since the last measurement.

    `usual_secs` is the longest gap but for one late token of each stream in a second, and for one
    in a measurement that is shorter.
    """

    tokens: int
    usual_secs: float
    worst_secs: float
    errors: list[str]


class SteadyClient:
    """The steady client of a server; `calm` is its service while nothing else happens."""

    def __init__(self, process: subprocess.Popen[str], streams: int) -> None:
        self._process = process
        self.streams = streams
        self.begin()
        self.calm = self.measure()

    def notices(self, served: Served) -> bool:
        """Whether a service is worse than before: gaps of more than twice those, or a long one."""
        most = max(FLOOR_SECS, 2 * self.calm.usual_secs)
        return served.usual_secs > most or served.worst_secs > WORST_SECS

    def begin(self) -> None:
        """Begin a measurement; tokens have come."""
        self._asked(1)

    def measure(self) -> Served:
        """Its service since the begin, of at least FEWEST gaps of each stream."""
        return self._asked(FEWEST)

    def _asked(self, fewest: int) -> Served:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{fewest}\n")
        self._process.stdin.flush()
        return Served(**json.loads(self._process.stdout.readline()))


@contextmanager
def steady_client(server: Serving, wires: Sequence[str], asked: bytes) -> Iterator[SteadyClient]:
    """A steady client of a server over these wires, for the length of the block.

    `asked` is its message to `repeat`.
    """
    given = {
        "ports": {wire: server.ports[wire] for wire in wires},
        "path": [server.process.pid, *children_of(server.process.pid)],
        "asked": asked.hex(),
    }
    command = [sys.executable, "-m", "tests.abuse.steady", json.dumps(given)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield SteadyClient(process, len(wires))
        finally:
            process.kill()


class _Stream:
    """The gaps of one stream, which a thread reads for ever."""

    def __init__(self, path: Sequence[int], read: Callable[[], object]) -> None:
        self._path = path
        self._read = read
        self._gaps: list[float] = []
        self.errors: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, fewest: int) -> list[float]:
        """The gaps since the last time, at least so few of them but after an error."""
        wait_until(lambda: len(self._gaps) >= fewest or bool(self.errors), "tokens come")
        gaps, self._gaps = self._gaps, []
        return gaps

    def _run(self) -> None:
        try:
            self._read()
            at, waited = time.monotonic(), self._waited()
            while True:
                self._read()
                now, more = time.monotonic(), self._waited()
                self._gaps.append(max(0.0, now - at - (more - waited)))
                at, waited = now, more
        except (OSError, ValueError, AssertionError) as error:
            self.errors.append(repr(error)[:300])

    def _waited(self) -> float:
        """The seconds for which this thread and the processes have waited for a processor."""
        own = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        files = (own, *(f"/proc/{each}/schedstat" for each in self._path))
        return sum(map(_waited_in, files))


def _waited_in(file: str) -> float:
    try:
        return int(Path(file).read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel that does not count, and a process that has ended
        return 0.0


def _http_reader(port: int) -> Callable[[], object]:
    connection = Connection(port)
    connection.ask("/v2/models/talker/generate_stream", ASKED)

    def read() -> None:
        event = connection.chunk()
        assert event.startswith(b"data: {"), event
        assert b'"error"' not in event, event

    assert connection.head().status == 200
    return read


def _grpc_reader(port: int, asked: bytes) -> Callable[[], object]:
    connection = Http2(port).begin()
    connection.send(connection.headers(1, request(STREAM_INFER)), DataFrame(1, message(asked)))
    found = connection.known(1)

    def read() -> None:
        size = len(found.body)
        while len(found.body) == size:
            connection.take(connection.receive())
            assert not found.ended, found

    return read


def _main(ports: Mapping[str, int], path: Sequence[int], asked: bytes) -> None:
    readers = {"http": _http_reader, "grpc": partial(_grpc_reader, asked=asked)}
    streams = [_Stream(path, readers[wire](port)) for wire, port in ports.items()]
    for line in sys.stdin:
        gaps = sorted(gap for each in streams for gap in each.take(int(line))) or [0.0]
        late = max(len(streams), math.ceil(len(gaps) * TOKEN_SECS) - 1)
        found = Served(
            tokens=len(gaps),
            usual_secs=gaps[max(0, len(gaps) - 1 - late)],
            worst_secs=gaps[-1],
            errors=[error for each in streams for error in each.errors],
        )
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _main(_given["ports"], _given["path"], bytes.fromhex(_given["asked"]))
