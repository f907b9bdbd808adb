"""The server under soak: a process with a log, a temporary folder and a dump of its tasks."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.soak import census
from loadtests.soak.census import Census
from loadtests.soak.models import FLAGS, MODELS, Trouble, write_repository
from loadtests.support.servers import ServerFailed, read_metrics

ROOT = Path(__file__).parents[2]
START_SECS = 120.0
STOP_SECS = 40.0
DUMP_SECS = 10.0
POLL_SECS = 0.05
TAIL = 20
OPEN_FILES = 1024
"""The limit of a common shell."""

LISTENING = re.compile(r"listening for=(http|grpc|metrics) port=(\d+)")
READY = re.compile(r"^\s+grpc\s+\S+:\d+\s*$", re.MULTILINE)
SAMPLE = re.compile(r'^(\w+)\{.*?model="([^"]+)".*\} (\S+)$')
ERROR = re.compile(r"^E\d{4} |^Traceback ")
KILLED = "|".join(model.name for model in MODELS if Trouble.KILLED in model.troubles)
EXPLAINED = re.compile(
    rf"(instance died|restart failed|request quarantined) model=({KILLED}) "
    r"|frontend \d+ ended status=-9 "
)


@dataclass(slots=True)
class SoakServer:
    """A running `sluice serve` on the repository of the soak, in `folder`."""

    folder: Path
    process: subprocess.Popen[bytes]
    flags: Sequence[str] = ()
    ports: dict[str, int] = field(default_factory=dict)
    _children: Sequence[int] = ()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def has_frontends(self) -> bool:
        """Whether processes of their own have the connections."""
        return any("--frontends" in flag for flag in self.flags)

    @property
    def repository(self) -> Path:
        """Where its models are."""
        return self.folder / "models"

    @property
    def log(self) -> str:
        """All it has written so far."""
        return (self.folder / "log").read_text(errors="replace")

    def errors(self) -> Sequence[str]:
        """The lines of the log with an error that no act explains."""
        lines = self.log.splitlines()
        return [line for line in lines if ERROR.match(line) and not EXPLAINED.search(line)]

    def metrics(self) -> Mapping[tuple[str, str], float]:
        """The samples of models by metric and model; those of several labels are added."""
        found: dict[tuple[str, str], float] = {}
        for line in read_metrics(self.ports["metrics"]):
            if match := SAMPLE.match(line):
                key = match[1], match[2]
                found[key] = found.get(key, 0.0) + float(match[3])
        return found

    def dump(self) -> Sequence[str]:
        """A line for each task of its event loop; none if the loop does not run."""
        path = self.folder / "dump"
        path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_SECS
        while not path.exists():
            if time.monotonic() > deadline:
                return []
            time.sleep(POLL_SECS)
        return path.read_text().splitlines()

    def threads(self) -> str:
        """The stacks of its threads at the latest dump."""
        found = (self.folder / "dump.threads").read_text()
        return found[found.rfind("Current thread") :]

    def take_census(self) -> Census:
        """All that it holds at this moment."""
        return census.take(self.pid, self.folder / "temporary", self.dump())

    def begin_stop(self) -> None:
        """Send SIGTERM, and do not wait for what comes of it."""
        self._children = list(census.descendants(self.pid))
        self.process.terminate()

    def wait_stopped(self, before: Census) -> Sequence[str]:
        """Wait for the end; what it leaves that was not there before, in words."""
        try:
            status = self.process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {STOP_SECS:g} s of SIGTERM"]
        found = [f"the server ended with status {status}"] if status else []
        left = [
            pid for pid in self._children if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)
        ]
        found += [f"process {pid} outlives the server" for pid in left]
        files = set(census.files(self.folder / "temporary")) - set(before.files)
        return [*found, *(f"temporary file {name} outlives the server" for name in files)]


@contextmanager
def serving(folder: Path, flags: Sequence[str] = ()) -> Iterator[SoakServer]:
    """A server that is ready; leaving the block ends it."""
    (folder / "models").mkdir()
    (folder / "temporary").mkdir()
    write_repository(folder / "models")
    command = [
        *(sys.executable, "-m", "loadtests.soak.census", str(folder / "dump"), "serve"),
        *(f"--model-repository={folder / 'models'}", "--http-address=127.0.0.1"),
        *("--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"),
        *(*FLAGS, *flags),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder / "temporary")},
            start_new_session=True,
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    server = SoakServer(folder, process, flags)
    try:
        _wait(server, lambda: READY.search(server.log) is not None)
        server.ports.update({name: int(port) for name, port in LISTENING.findall(server.log)})
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(server: SoakServer, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECS
    while not ready():
        tail = "\n".join(server.log.splitlines()[-TAIL:])
        if server.process.poll() is not None:
            raise ServerFailed(f"the server ended with {server.process.returncode}\n{tail}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server is not ready after {START_SECS:g} s\n{tail}")
        time.sleep(POLL_SECS)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
