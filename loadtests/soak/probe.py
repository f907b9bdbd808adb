"""Latency of `/v2/health/live` during the soak, measured by a process of its own.

`python -m loadtests.soak.probe PORT PID` asks the server and, at the same moment, a server of its
own that does nothing. It ends with its standard input and prints one line of JSON.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadtests.support.results import quantile

EVERY_SECS = 0.05
LATE_SECS = 0.1
RETRY_SECS = 0.01
HELD_SHARE = 0.01
HOLD_SECS = 1.0
ANSWER_SECS = 30.0
END_SECS = 40.0
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n"
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one probe; `queued` are those of the server's threads that waited for a CPU.

    All threads count: one that holds the interpreter's lock and does not run stops the others.
    """

    server: float
    control: float
    queued: float

    @property
    def late(self) -> bool:
        """The answer was later than its limit."""
        return self.server > LATE_SECS

    @property
    def unexplained(self) -> float:
        """Seconds that the machine does not explain: the server itself was busy."""
        return max(0.0, self.server - self.control - self.queued)

    @property
    def held(self) -> bool:
        """These seconds alone are beyond the limit."""
        return self.unexplained > LATE_SECS


NONE = Sample(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Probes:
    """All samples of a run."""

    samples: Sequence[Sample]

    @property
    def late(self) -> int:
        """The number of answers after their limit."""
        return sum(sample.late for sample in self.samples)

    @property
    def held(self) -> int:
        """The number of late answers that the machine does not explain."""
        return sum(sample.held for sample in self.samples)

    @property
    def good(self) -> bool:
        """The server held at most a few probes, and none for long."""
        few = self.held <= max(1, HELD_SHARE * len(self.samples))
        return few and self.worst.unexplained < HOLD_SECS

    @property
    def worst(self) -> Sample:
        """The sample that the machine explains least."""
        return max(self.samples, key=lambda each: each.unexplained, default=NONE)

    def latency(self, share: float) -> float:
        """The latency in seconds that this share of the probes did not exceed."""
        return quantile([sample.server for sample in self.samples], share)


@contextmanager
def probing(port: int, pid: int) -> Iterator[list[Probes]]:
    """Probe the server during the block; afterwards the list has the probes."""
    found: list[Probes] = []
    command = [sys.executable, "-m", "loadtests.soak.probe", str(port), str(pid)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield found
        output, _ = process.communicate(timeout=END_SECS)
        found.append(Probes([Sample(*each) for each in json.loads(output)]))
    finally:
        process.kill()
        process.communicate()


async def _run(port: int, pid: int) -> Sequence[Sample]:
    control = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert control.stdout is not None  # noqa: S101 - the argument above makes a pipe
    control_port = int(await control.stdout.readline())
    samples: list[Sample] = []
    try:
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.buffer.read))
        while not ended.done():
            samples.append(await _sample(port, control_port, pid))
            await asyncio.wait([ended], timeout=EVERY_SECS)
    finally:
        control.kill()
        await control.wait()
    return samples


async def _sample(port: int, control_port: int, pid: int) -> Sample:
    before = _queued(pid)
    server, control = await asyncio.gather(_ask(port), _ask(control_port))
    return Sample(server, control, max(0.0, _queued(pid) - before))


async def _ask(port: int) -> float:
    """Seconds until an answer, with its connection; ANSWER_SECS for none.

    A connection that fails, as by the end of a frontend, is made once more.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_SECS):
            while not await _answered(port):  # noqa: ASYNC110 - the server sends no event
                await asyncio.sleep(RETRY_SECS)
    except TimeoutError:
        return ANSWER_SECS
    return time.perf_counter() - began


async def _answered(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(REQUEST)
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
        finally:
            writer.close()
    except OSError:
        return False


def _queued(pid: int) -> float:
    """Seconds for which the server's threads have waited for a processor; 0 if unknown."""
    waited = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may have ended.
        with suppress(OSError, IndexError):
            waited += int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waited


CONTROL = f"""
import asyncio, sys

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write({RESPONSE!r})
    writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)

asyncio.run(main())
"""


if __name__ == "__main__":
    port_, pid_ = map(int, sys.argv[1:])
    print(json.dumps([(s.server, s.control, s.queued) for s in asyncio.run(_run(port_, pid_))]))
