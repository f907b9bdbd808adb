"""The life of a worker: load, complete, finalize, and its end with or without the gateway."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import (
    WAIT_SECS,
    PlayedGateway,
    model,
    request,
    tensor,
    worker,
)

EMPTY = "class TritonPythonModel:\n    def execute(self, requests):\n        return None\n"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[PlayedGateway]:
    """A worker that has got no message, for a model in a folder `m`."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    found = PlayedGateway(tmp_path / "m")
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", "SyntaxError: invalid syntax (model.py, line 5)"),
        ("import nope_nope", "ModuleNotFoundError: No module named 'nope_nope'"),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        {}[1]",
            "KeyError: 1",
        ),
        ("raise SystemExit(4)", "SystemExit: 4"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    tmp_path: Path, gateway: PlayedGateway, text: str, message: str
) -> None:
    model(tmp_path / "m", text)
    kind, (found, trace, code) = gateway.load()
    assert (kind, found, code) == ("FAILED", message, "INTERNAL")
    assert "Traceback" in trace
    gateway.ping()


def test_a_model_finds_no_command_line(tmp_path: Path) -> None:
    text = f"import sys\nassert sys.argv == [''], sys.argv\n{EMPTY}"
    with worker(tmp_path, text) as found:
        found.ping()


def test_a_missing_file_is_named_without_the_hosts_folders(gateway: PlayedGateway) -> None:
    missing = ["Python model file not found in 'm/1/model.py'", "", "INTERNAL"]
    assert gateway.load() == ("FAILED", missing)


def test_the_file_may_have_another_name(tmp_path: Path, gateway: PlayedGateway) -> None:
    model(tmp_path / "m", EMPTY, name="other.py")
    kind, _ = gateway.load(config={"default_model_filename": "other.py"})
    assert kind == "LOADED"


def test_the_file_must_be_python(gateway: PlayedGateway) -> None:
    kind, (message, *_) = gateway.load(config={"default_model_filename": "model.pt"})
    assert (kind, message) == (
        "FAILED",
        "Model name must end with '.py'. Model name is \"model.pt\".",
    )


def test_siblings_can_be_imported_by_name_and_relatively(
    tmp_path: Path, gateway: PlayedGateway
) -> None:
    (tmp_path / "m" / "1" / "sibling.py").write_text("value = 1\n")
    (tmp_path / "m" / "shared_by_versions.py").write_text("value = 2\n")
    text = "import sibling\nimport shared_by_versions\nfrom . import sibling as same\n" + EMPTY
    model(tmp_path / "m", text)
    assert gateway.load()[0] == "LOADED"


def test_a_backends_folder_has_the_file_of_a_python_based_backend(
    tmp_path: Path, gateway: PlayedGateway
) -> None:
    backend = tmp_path / "backend"
    backend.mkdir()
    (backend / "beside.py").write_text("value = 1\n")
    text = """
import os, beside
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        assert pb_utils.get_model_dir() == os.path.join(args["model_repository"], "1")
        assert __name__ == "model"
"""
    (backend / "model.py").write_text(text)
    kind, found = gateway.load(backend_path=str(backend))
    assert kind == "LOADED", found


def test_initialize_gets_texts_only(tmp_path: Path, gateway: PlayedGateway) -> None:
    text = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError(repr({key: type(value).__name__ for key, value in args.items()}))
"""
    model(tmp_path / "m", text)
    _, (message, *_) = gateway.load()
    keys = ("config", "instance_kind", "instance_name", "instance_device_id", "repository")
    expected = {f"model_{key}": "str" for key in (*keys, "version", "name")}
    assert message == f"ValueError: {expected!r}"


def test_a_config_is_completed(tmp_path: Path, gateway: PlayedGateway) -> None:
    text = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "w", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_max_batch_size(4)
        return config
"""
    model(tmp_path / "m", text)
    kind, (completed,) = gateway.complete()
    found = json.loads(completed)
    assert (kind, found["max_batch_size"]) == ("COMPLETED", 4)
    assert found["output"][-1] == {"name": "w", "data_type": "TYPE_INT32", "dims": [1]}


def test_a_model_need_not_complete_its_config(tmp_path: Path, gateway: PlayedGateway) -> None:
    model(tmp_path / "m", EMPTY)
    assert gateway.complete() == ("COMPLETED", [None])


def test_a_completed_config_must_be_returned(tmp_path: Path, gateway: PlayedGateway) -> None:
    text = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_dynamic_batching()
"""
    model(tmp_path / "m", text)
    assert gateway.complete()[1][0] == (
        "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."
    )


@pytest.mark.parametrize(
    ("body", "error"),
    [("print('finalized')", None), ("raise ValueError('at the end')", "ValueError: at the end")],
)
def test_finalize_is_called_and_the_worker_ends(
    tmp_path: Path, gateway: PlayedGateway, body: str, error: str | None
) -> None:
    model(tmp_path / "m", f"{EMPTY}\n    def finalize(self):\n        {body}\n")
    gateway.load()
    gateway.say(ToWorker.FINALIZE)
    (found,) = gateway.hear(ToGateway.FINALIZED).values
    assert (found or "").split("\n")[0] == (error or "")
    assert gateway.process.wait(WAIT_SECS) == 0
    assert ("finalized" in gateway.printed()) == (error is None)


BUSY = """
class TritonPythonModel:
    def execute(self, requests):
        print("busy", flush=True)
        while True:
            pass
"""


def test_a_busy_worker_ends_with_the_gateway(tmp_path: Path) -> None:
    with worker(tmp_path, BUSY) as gateway:
        header, data = tensor(1)
        gateway.begin(request(1, header), buffers=[data])
        assert gateway.process.stdout is not None
        assert gateway.process.stdout.readline() == b"busy\n"
        gateway.ping()
        gateway.hang_up(gateway.control)
        assert gateway.process.wait(WAIT_SECS) != 0


def test_a_forked_child_keeps_no_socket_open(tmp_path: Path) -> None:
    text = """
import os, time

class TritonPythonModel:
    def execute(self, requests):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        os._exit(7)
"""
    with worker(tmp_path, text) as gateway:
        header, data = tensor(1)
        gateway.begin(request(1, header), buffers=[data])
        assert gateway.process.wait(WAIT_SECS) == 7
        # The end of the connection is seen while the child still runs.
        for each in gateway.listening:
            each.join(WAIT_SECS)
            assert not each.is_alive()
        assert gateway.process.stdout is not None
        os.kill(int(gateway.process.stdout.readline()), signal.SIGKILL)


def test_output_is_flushed_at_the_end_of_each_line(tmp_path: Path) -> None:
    text = "class TritonPythonModel:\n    def initialize(self, args):\n        print('hello')\n"
    with worker(tmp_path, text) as gateway:
        assert gateway.process.stdout is not None
        assert gateway.process.stdout.readline() == b"hello\n"


def test_a_crash_leaves_the_stack_on_stderr(tmp_path: Path) -> None:
    text = """
import ctypes

class TritonPythonModel:
    def execute(self, requests):
        ctypes.string_at(0)
"""
    with worker(tmp_path, text) as gateway:
        header, data = tensor(1)
        gateway.begin(request(1, header), buffers=[data])
        assert gateway.process.wait(WAIT_SECS) == -11
        assert "Fatal Python error: Segmentation fault" in gateway.printed()
