"""The server under soak: its repository, process and log, and a census of its contents."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtests.soak.keys import Keys
from loadtests.soak.models import FLAGS, MODELS, Form, Model, Trouble
from loadtests.soak.replicas import Replicas
from loadtests.soak.slopes import DESCRIPTORS, MEMORY, TASKS, THREADS
from loadtests.support.servers import (
    PROC,
    ServerFailed,
    descendants,
    is_running,
    name_of,
    read_metrics,
    read_proc,
    resident_bytes,
)

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
FRONTEND_KILLED = re.compile(r"frontend \d+ ended status=-9 ")
WORKER_KILLED = re.compile(
    rf"(instance died|restart failed|request quarantined) model=({KILLED}) "
    rf"|finalize failed model=({KILLED}) .* it was ended by SIGKILL"
)


WORKER = b"backends/python/worker"
FRONTEND = b"gateway.processes"
POOLED = {"/memfd": 64}
"""Descriptors that a server keeps for reuse: a worker's pool has at most 64 segments."""

AT_REPLICA = " at replica "


@dataclass(frozen=True, slots=True)
class Census:
    """Each count by kind; `memory_bytes` is of the server's own process."""

    processes: Mapping[str, int]
    descriptors: Mapping[str, int]
    tasks: Mapping[str, int]
    files: Mapping[str, int]
    memory_bytes: int

    def grown(self, before: "Census") -> Sequence[str]:
        """The counts that are higher than before, in words."""
        found = []
        for noun in ("processes", "descriptors", "tasks", "files"):
            now, then = getattr(self, noun), getattr(before, noun)
            found += [
                f"{noun}: {count} of {kind}, {then.get(kind, 0)} before"
                for kind, count in now.items()
                if count > max(then.get(kind, 0), POOLED.get(kind.partition(AT_REPLICA)[0], 0))
            ]
        return found

    def lost(self, before: "Census") -> Sequence[str]:
        """The processes that were not restarted, in words."""
        return [
            f"processes: {self.processes.get(kind, 0)} of {kind}, {count} before"
            for kind, count in before.processes.items()
            if count > self.processes.get(kind, 0)
        ]

    def with_replica(self, port: int, found: "Census") -> "Census":
        """This and that of a replica, without its files: those of killed ones remain."""
        counts = {
            noun: getattr(self, noun)
            | {f"{kind}{AT_REPLICA}{port}": count for kind, count in getattr(found, noun).items()}
            for noun in ("processes", "descriptors", "tasks")
        }
        return replace(self, **counts)


@dataclass(slots=True)
class SoakServer:
    """A running `sluice serve` on the repository of the soak, in `folder`.

    With replicas it is their router, and they have the models.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    keys: Keys
    flags: Sequence[str] = ()
    replicas: Replicas | None = None
    ports: dict[str, int] = field(default_factory=dict)
    _children: Sequence[int] = ()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def has_frontends(self) -> bool:
        """Frontend processes have the connections."""
        return any("--frontends" in flag for flag in self.flags)

    @property
    def repository(self) -> Path:
        """The folder of its models."""
        return self.folder / "models"

    @property
    def log(self) -> str:
        """The text of its log until now."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def death(self) -> str:
        """The end of its process in words, with the last lines of its log; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        tail = "\n".join(self.log.splitlines()[-TAIL:])
        return f"the server ended with {status}\n{tail}"

    def errors(self) -> Sequence[str]:
        """The lines of its log, and of those of its replicas, with an error no act explains."""
        killed, lines = [FRONTEND_KILLED], self.log.splitlines()
        if self.replicas is None:
            killed.append(WORKER_KILLED)
        else:
            lines += self.replicas.lines
        errors = filter(ERROR.match, lines)
        return [line for line in errors if not any(each.search(line) for each in killed)]

    def metrics(self) -> Mapping[tuple[str, str], float]:
        """Samples by metric and model; those of several labels are added."""
        found: dict[tuple[str, str], float] = {}
        for line in read_metrics(self.ports["metrics"]):
            if match := SAMPLE.match(line):
                key = match[1], match[2]
                found[key] = found.get(key, 0.0) + float(match[3])
        return found

    def read(self, *, collected: bool = False) -> Mapping[str, float]:
        """Its memory, descriptors, threads and tasks, and the lengths of its tables.

        Those of garbage are not there if it is `collected` before.
        """
        if collected:
            self.process.send_signal(signal.SIGUSR2)
            self.dump()  # after it the signal has been handled, too
        tasks = len(self.dump())
        tables = json.loads((self.folder / "dump.tables").read_text())
        process = PROC / str(self.pid)
        return {
            **tables,
            MEMORY: resident_bytes(self.pid),
            DESCRIPTORS: len(os.listdir(process / "fd")),
            THREADS: len(os.listdir(process / "task")),
            TASKS: tasks,
        }

    def dump(self) -> Sequence[str]:
        """A line for each task of its event loop; none if the loop is blocked."""
        return _dump(self.process, self.folder / "dump")

    def take_census(self) -> Census:
        """All that it, and its replicas once they are ready, hold at this moment."""
        temporary = self.folder / "temporary"
        found = take(self.pid, temporary, self.dump())
        if self.replicas is not None:
            self.replicas.wait_ready()
            for port, process in self.replicas.processes.items():
                tasks = _dump(process, self.replicas.dump(port))
                found = found.with_replica(port, take(process.pid, temporary, tasks))
        return found

    def begin_stop(self) -> None:
        """Send SIGTERM without waiting."""
        self._children = list(descendants(self.pid))
        self.process.terminate()

    def wait_stopped(self, before: Census) -> Sequence[str]:
        """Wait for the end; processes and files that remain, in words."""
        try:
            status = self.process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {STOP_SECS:g} s of SIGTERM"]
        found = [f"the server ended with status {status}"] if status else []
        left = filter(is_running, self._children)
        found += [f"process {pid} outlives the server" for pid in left]
        new = set(files(self.folder / "temporary")) - set(before.files)
        found += [f"temporary file {name} outlives the server" for name in new]
        return [*found, *(self.replicas.stop() if self.replicas else ())]


@contextmanager
def serving(
    folder: Path, flags: Sequence[str] = (), *, is_router: bool = False
) -> Iterator[SoakServer]:
    """A server that is ready; leaving the block ends it."""
    for name in ("models", "temporary", "empty"):
        (folder / name).mkdir()
    write_repository(folder / "models")
    keys = Keys(folder)
    with ExitStack() as owner:
        replicas = None
        if is_router:
            replicas = Replicas(folder, folder / "models")
            owner.callback(replicas.kill)
            replicas.wait_ready()
            flags = (*flags, *replicas.flags)
        server = _started(folder, keys, flags, replicas)
        owner.callback(_end, server)
        _wait(server, lambda: READY.search(server.log) is not None)
        server.ports.update({name: int(port) for name, port in LISTENING.findall(server.log)})
        yield server


def _started(
    folder: Path, keys: Keys, flags: Sequence[str], replicas: Replicas | None
) -> SoakServer:
    repository = folder / ("empty" if replicas else "models")
    command = [
        *(sys.executable, "-m", "loadtests.soak.inside", str(folder / "dump"), "serve"),
        *(f"--model-repository={repository}", "--http-address=127.0.0.1"),
        *("--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"),
        *(f"--api-keys={keys.file}", "--metrics-open=true"),
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
    return SoakServer(folder, process, keys, flags, replicas)


def _dump(process: subprocess.Popen[bytes], path: Path) -> Sequence[str]:
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + DUMP_SECS
    while not path.exists():
        if time.monotonic() > deadline:
            return []
        time.sleep(POLL_SECS)
    return path.read_text().splitlines()


def _end(server: SoakServer) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.process.wait()


def _wait(server: SoakServer, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECS
    while not ready():
        if death := server.death:
            raise ServerFailed(death)
        if time.monotonic() > deadline:
            tail = "\n".join(server.log.splitlines()[-TAIL:])
            raise ServerFailed(f"the server is not ready after {START_SECS:g} s\n{tail}")
        time.sleep(POLL_SECS)


OF_VERSIONS = "reloaded"
"""A model with two versions, which are loaded and unloaded alone."""
OPENAI_PROGRAM = ROOT / "model_repository" / "openai_python" / "1" / "model.py"


def write_repository(folder: Path) -> None:
    """Write every model."""
    for model in MODELS:
        (folder / model.name / "1").mkdir(parents=True)
        config(folder, model).write_text(model.config)
        version = folder / model.name / "1"
        if model.program:
            (version / "model.py").write_text(model.program)
        elif model.form is Form.OPENAI:
            shutil.copy(OPENAI_PROGRAM, version / "model.py")
        elif model.onnx:
            _write_onnx(version / "model.onnx")
    (folder / OF_VERSIONS / "2").mkdir()


def config(folder: Path, model: Model) -> Path:
    """The path of the config of a model."""
    return folder / model.name / "config.pbtxt"


def _write_onnx(path: Path) -> None:
    """A network that answers `x` as `y`."""
    import onnx
    from onnx import TensorProto, helper

    names = ("x", "y")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 1]) for n in names)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def take(pid: int, temporary: Path, tasks: Sequence[str]) -> Census:
    """The census of a server; `tasks` are the lines of its dump."""
    return Census(
        processes=Counter(_kind(each) for each in descendants(pid)),
        descriptors=_descriptors(pid),
        tasks=Counter(line.partition(" < ")[0] for line in tasks),
        files=Counter(files(temporary)),
        memory_bytes=resident_bytes(pid),
    )


def frontends(pid: int) -> Sequence[int]:
    """The frontend processes of a server."""
    return [each for each in descendants(pid) if FRONTEND in read_proc(each, "cmdline")]


def files(folder: Path) -> Sequence[str]:
    """The names of all files and folders within a folder."""
    return [name for _, folders, names in os.walk(folder) for name in (*folders, *names)]


def workers(pid: int, model: str) -> Sequence[int]:
    """The worker processes of a Python model; each has the name of its model."""
    return [each for each in descendants(pid) if name_of(each) == model]


def _kind(pid: int) -> str:
    command = read_proc(pid, "cmdline")
    if WORKER in command:
        return f"worker {name_of(pid)}"
    if FRONTEND in command:
        return "frontend"
    return command.replace(b"\0", b" ").decode(errors="replace")[:60] or "ended"


def _descriptors(pid: int) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    # The process, or a descriptor, may have ended.
    with suppress(OSError):
        for each in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found[os.readlink(each).partition(":")[0]] += 1
    return found
