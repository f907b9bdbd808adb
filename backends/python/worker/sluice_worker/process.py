"""The process in which a model.py runs, and its socket for messages that must not wait.

It needs Python's library and numpy, and nothing of the gateway: it runs in the model's own
environment, with the folder above this one on its path.
"""

import faulthandler
import gc
import importlib.util
import io
import json
import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any

from .connection import GatewayConnection, end_group, parsed
from .errors import BadAnswer, ErrorCode, described_failure
from .executions import Background, Executions
from .model_config import ModelConfig
from .open_requests import OpenRequests
from .protocol import FrameSplitter, ToGateway, ToWorker
from .work import GatewayCalls, LifeStage, WorkerState, WorkSocket, set_worker, take_inferred

DEFAULT = "model.py"


class ReadinessChecks:
    """Calls `is_ready` in a thread of its own, one call after the other."""

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._calls: SimpleQueue[int] = SimpleQueue()

    def serve(self, model: Any, background: Background) -> None:
        """Start to answer calls."""
        answering = threading.Thread(
            target=self._answer, args=(model.is_ready, background), daemon=True
        )
        answering.start()

    def ask(self, call: int) -> None:
        """Queue a call."""
        self._calls.put(call)

    def _answer(self, is_ready: Any, background: Background) -> None:
        while True:
            answer: list[Any] = [ToGateway.READY, self._calls.get()]
            try:
                self._connection.send_control([*answer, _asked(is_ready, background), None])
            except BaseException as failure:  # noqa: BLE001 - around one call of foreign code
                self._connection.send_control([*answer, None, described_failure(failure)[0]])


def _asked(is_ready: Any, background: Background) -> bool:
    found = is_ready()
    if isinstance(found, Coroutine):
        found = background.result(found)
    if not isinstance(found, bool):
        raise BadAnswer("is_ready() must return a boolean value")
    return found


class ControlSocket:
    """Reads messages of the gateway; ends the process when the gateway closes the socket."""

    def __init__(
        self, connection: GatewayConnection, calls: GatewayCalls, readiness: ReadinessChecks
    ) -> None:
        self.requests: OpenRequests | None = None
        self._connection, self._calls, self._readiness = connection, calls, readiness
        self._handlers: dict[int, Callable[[list[Any], memoryview], None]] = {
            ToWorker.CANCEL: self._cancel,
            ToWorker.RELEASED: self._released,
            ToWorker.PING: self._ping,
            ToWorker.IS_READY: self._is_ready,
            ToWorker.INFERRED: self._inferred,
            ToWorker.DONE: self._done,
            ToWorker.HOLD: self._hold,
            ToWorker.GO_ON: self._go_on,
        }

    def start(self) -> None:
        """Start the thread that reads."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Without the gateway the process ends, also during a call of model.py.
        try:
            reader = FrameSplitter()
            while data := self._connection.receive_control():
                for text, body in reader.feed(data):
                    header = parsed(text)
                    self._handlers[header[0]](header, body)
        finally:
            end_group()

    def _cancel(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.cancel(header[1:])

    def _hold(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.hold(header[1:])

    def _go_on(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.go_on(header[1:])

    def _released(self, header: list[Any], _: memoryview) -> None:
        _, freed, dropped = header
        self._connection.outgoing.freed(freed)
        self._connection.incoming.drop(dropped)

    def _ping(self, header: list[Any], _: memoryview) -> None:
        self._connection.send_control([ToGateway.PONG, header[1]])
        self._connection.send_released()

    def _is_ready(self, header: list[Any], _: memoryview) -> None:
        self._readiness.ask(header[1])

    def _inferred(self, header: list[Any], body: memoryview) -> None:
        take_inferred(self._connection, self._calls, header, body)

    def _done(self, header: list[Any], _: memoryview) -> None:
        _, call, error, value = header
        self._calls.answer(call, (error, value), final=True)


class ModelSource:
    """The file of a model's code, in its version folder or in that of a Python-based backend."""

    def __init__(self, model_config: str, version_folder: str, backend_folder: str) -> None:
        config = json.loads(model_config)
        self._version_folder, self._backend_folder = version_folder, backend_folder
        if backend_folder:
            self._name = str(config.get("runtime") or DEFAULT)
        else:
            self._name = str(config.get("default_model_filename") or DEFAULT)

    @property
    def shown(self) -> str:
        """The path for clients, relative to the parent of the model's or the backend's folder."""
        if self._backend_folder:
            return f"{os.path.basename(self._backend_folder)}/{self._name}"
        model_folder, version = os.path.split(self._version_folder)
        return f"{os.path.basename(model_folder)}/{version}/{self._name}"

    def python_model(self) -> Any:
        """The class `TritonPythonModel` of the file; raises what its import raises."""
        module = self._imported()
        try:
            return module.TritonPythonModel
        except AttributeError:
            raise AttributeError(
                f"module '{module.__name__}' has no attribute 'TritonPythonModel'"
            ) from None

    def _imported(self) -> types.ModuleType:
        if not self._name.endswith(".py"):
            raise BadAnswer(f"Model name must end with '.py'. Model name is \"{self._name}\".")
        path = os.path.join(self._backend_folder or self._version_folder, self._name)
        if not os.path.isfile(path):
            raise BadAnswer(f"Python model file not found in '{self.shown}'")
        self._extend_path()
        stem = self._name[: -len(".py")]
        if self._backend_folder:
            return _load(stem, path)
        version = os.path.basename(self._version_folder)
        _add_package(version, self._version_folder)
        return _load(f"{version}.{stem}", path)

    def _extend_path(self) -> None:
        """Append to `sys.path` as Triton does: the folders of version, model and backend."""
        own = sys.path.pop(0)
        folders = [self._version_folder, os.path.dirname(self._version_folder), own]
        if self._backend_folder:
            folders.append(self._backend_folder)
        sys.path.extend(folders)


def _load(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{name}' cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _add_package(name: str, folder: str) -> None:
    """Make `from . import sibling` work in a file of this folder."""
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules.setdefault(name, package)


LINGER_SECS = 5.0
"""Time that coroutines in the background have before `finalize`."""


class Process:
    """Runs the messages that arrive over `work`, one after the other."""

    def __init__(self, connection: GatewayConnection) -> None:
        calls = GatewayCalls(connection)
        self._work = WorkSocket(connection, calls)
        self._worker = WorkerState(connection, calls, self._work)
        self._connection = connection
        self._readiness = ReadinessChecks(connection)
        self._control = ControlSocket(connection, calls, self._readiness)
        self._model: Any = None
        self._executions: Executions | None = None
        set_worker(self._worker)

    def run(self) -> None:
        """Serve until FINALIZE arrives or the gateway closes the socket; then end the process."""
        self._control.start()
        while (message := self._work.next()) is not None:
            self._handle(*message)
        end_group()

    def _handle(self, header: list[Any], body: memoryview) -> None:
        kind = header[0]
        if kind == ToWorker.EXECUTE and self._executions is not None:
            self._executions.run(header[1], header[2], body)
        elif kind == ToWorker.COMPLETE:
            self._complete(header[1])
        elif kind == ToWorker.LOAD:
            self._load(header[1])
        else:
            self._finalize()

    def _complete(self, about: dict[str, Any]) -> None:
        self._worker.stage = LifeStage.COMPLETING
        self._worker.model_folder = about["path"]
        try:
            answer = [ToGateway.COMPLETED, _completed(about)]
        except BaseException as failure:  # noqa: BLE001 - around one load of foreign code
            answer = _failed(failure)
        self._connection.send(answer)

    def _load(self, about: dict[str, Any]) -> None:
        try:
            answer = [ToGateway.LOADED, self._loaded(about)]
        except BaseException as failure:  # noqa: BLE001 - around one load of foreign code
            answer = _failed(failure)
        self._connection.send(answer)

    def _loaded(self, about: dict[str, Any]) -> dict[str, bool]:
        args = about["args"]
        self._worker.stage = LifeStage.INITIALIZING
        self._worker.model_folder = about["path"]
        self._worker.calls.instance = args["model_instance_name"]
        source = ModelSource(args["model_config"], about["path"], about["backend_path"])
        self._model = source.python_model()()
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(args))
        instance = args["model_instance_name"]
        requests = OpenRequests(self._connection, instance, bool(about["decoupled"]))
        self._executions = Executions(self._model, args, source.shown, requests)
        self._control.requests = requests
        checks_readiness = hasattr(self._model, "is_ready")
        if checks_readiness:
            self._readiness.serve(self._model, self._executions.background)
        self._worker.stage = LifeStage.SERVING
        # Collections skip the objects of the loaded model.
        gc.collect()
        gc.freeze()
        return {"checks_readiness": checks_readiness}

    def _finalize(self) -> None:
        if self._executions is not None:
            self._executions.background.wait(LINGER_SECS)
        self._worker.stage = LifeStage.FINALIZING
        error: str | None = None
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException as failure:  # noqa: BLE001 - the gateway logs it
            error = "\n".join(described_failure(failure))
        self._connection.send([ToGateway.FINALIZED, error])
        _end()


def _failed(failure: BaseException) -> list[Any]:
    code = failure.code if isinstance(failure, BadAnswer) else ErrorCode.INTERNAL.name
    return [ToGateway.FAILED, *described_failure(failure), code]


def _completed(about: dict[str, Any]) -> str | None:
    source = ModelSource(about["model_config"], about["path"], about["backend_path"])
    complete = getattr(source.python_model(), "auto_complete_config", None)
    if complete is None:
        return None
    found = complete(ModelConfig(about["model_config"]))
    if not isinstance(found, ModelConfig):
        raise BadAnswer(
            f"auto_complete_config function in model '{about['model_name']}' must return a valid "
            "pb.ModelConfig object."
        )
    return found.text()


def _end() -> None:
    """Flush output and end without waiting for model.py's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serve over the sockets of these numbers."""
    faulthandler.enable()
    # A line that model.py prints is in the log at once, not when a buffer is full.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    sockets = [socket.socket(fileno=int(each)) for each in arguments]
    for each in sockets:
        each.set_inheritable(False)
    Process(GatewayConnection(*sockets)).run()
