"""Backends are created once, one at a time, from any thread."""

import importlib.metadata
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway import backend_loader
from gateway.backend import Backend, Fact, Instance, ModelContext
from gateway.backend_loader import (
    GROUP,
    REPLACED_METHODS,
    BackendLoader,
    refuse_replaced_methods,
)
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

LONG_SECS = 10.0


class Runtime(Backend):
    """A backend that serves nothing."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        raise AssertionError("nothing is loaded here")


@dataclass(slots=True)
class Creation:
    """The entry that is installed under a name: `make` is called to create it."""

    name: str
    make: Callable[[], Any]
    value: str = "runtime:Runtime"
    created: list[Any] = field(default_factory=list)

    def load(self) -> Callable[[], Any]:
        return self._create

    def _create(self) -> Any:
        self.created.append(self.make())
        return self.created[-1]


def loader_of(
    monkeypatch: pytest.MonkeyPatch,
    *points: Any,
    settings: Mapping[str, Mapping[str, str]] | None = None,
    kept: Path | None = None,
    directory: Path | None = None,
) -> BackendLoader:
    """A loader for which nothing but these is installed."""

    def installed(group: str) -> tuple[Any, ...]:
        assert group == GROUP
        return points

    monkeypatch.setattr(backend_loader, "OWN_BACKENDS", {})
    monkeypatch.setattr(importlib.metadata, "entry_points", installed)
    return BackendLoader(settings or {}, kept, directory)


class Meeting:
    """Creations that wait a moment for each other; under one loader they never meet."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self.took_place = False

    def create(self) -> Backend:
        try:
            self._barrier.wait(0.3)
        except threading.BrokenBarrierError:
            return Runtime()
        self.took_place = True
        return Runtime()


def test_two_threads_that_ask_for_one_backend_create_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = Meeting()
    point = Creation("slow", meeting.create)
    loader = loader_of(monkeypatch, point)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(loader.get, ["slow", "slow"])
    assert first is second
    assert point.created == [first]
    assert not meeting.took_place


def test_two_backends_are_never_created_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting()
    points = [Creation(name, meeting.create) for name in ("one", "other")]
    loader = loader_of(monkeypatch, *points)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(loader.get, ["one", "other"]))
    assert [point.created for point in points] == [[backend] for backend in found]
    assert not meeting.took_place


def test_a_created_backend_is_returned_while_another_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, gate = threading.Event(), threading.Event()

    def create_slowly() -> Backend:
        entered.set()
        gate.wait(LONG_SECS)
        return Runtime()

    slow = Creation("slow", create_slowly)
    loader = loader_of(monkeypatch, slow, Creation("quick", Runtime))
    quick = loader.get("quick")
    with ThreadPoolExecutor(1) as threads:
        creating = threads.submit(loader.get, "slow")
        assert entered.wait(LONG_SECS)
        assert loader.get("quick") is quick
        assert not creating.done()
        gate.set()
        assert creating.result(LONG_SECS) is slow.created[0]


def test_a_creation_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([ImportError("No module named 'runtime'"), Runtime()])

    def create() -> Backend:
        outcome = next(outcomes)
        if isinstance(outcome, ImportError):
            raise outcome
        return outcome

    point = Creation("late", create)
    loader = loader_of(monkeypatch, point)
    with pytest.raises(InferenceError, match="'late' cannot be imported: No module named 'runtim"):
        loader.get("late")
    assert loader.get("late") is point.created[0]


def test_a_backend_that_imports_a_moved_module_fails_with_its_present_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = importlib.metadata.EntryPoint("old", "gateway.data_type:DataType", GROUP)
    loader = loader_of(monkeypatch, old)
    with pytest.raises(InferenceError, match=r"; import 'gateway\.config' instead$"):
        loader.get("old")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nowhere", Code.INVALID_ARG, "unable to find backend 'nowhere'; installed backends: abs"),
        ("absent", Code.UNAVAILABLE, "'absent' cannot be imported: No module named 'no_runtime'"),
        ("strange", Code.INTERNAL, "'strange' is no gateway.backend.Backend: runtime:Runtime"),
    ],
)
def test_a_backend_that_cannot_be_created_is_an_error(
    name: str, code: Code, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = importlib.metadata.EntryPoint("absent", "no_runtime.backend:Runtime", GROUP)
    loader = loader_of(monkeypatch, absent, Creation("strange", object))
    with pytest.raises(InferenceError) as refused:
        loader.get(name)
    assert refused.value.code is code
    assert text in refused.value.message


LIBGOMP = "libgomp.so.1: cannot open shared object file: No such file or directory"
FAILURES: list[tuple[Exception, str]] = [
    (OSError(LIBGOMP), f"{LIBGOMP}; on Debian and Ubuntu: apt-get install libgomp1"),
    (ImportError(LIBGOMP), f"{LIBGOMP}; on Debian and Ubuntu: apt-get install libgomp1"),
    (OSError("/opt/it/lib_x.so: undefined symbol:\n y"), "lib_x.so: undefined symbol: y"),
    (FileNotFoundError(2, "No such file", "/opt/it/x.ini"), "[Errno 2] No such file: 'x.ini'"),
    (
        ImportError(f"cannot import name 'a' from 'b' ({sys.prefix}/my files/b.py)"),
        "cannot import name 'a' from 'b' (b.py); install what it needs",
    ),
    (ImportError("see https://a.b/c/d"), "see https://a.b/c/d; install what it needs"),
]


@pytest.mark.parametrize(("error", "text"), FAILURES)
def test_a_failed_import_names_its_reason_and_remedy_without_folders_of_the_host(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create() -> Backend:
        raise error

    monkeypatch.syspath_prepend(f"{sys.prefix}/my files")
    loader = loader_of(monkeypatch, Creation("broken", create))
    with pytest.raises(InferenceError) as refused:
        loader.get("broken")
    assert refused.value.code is Code.UNAVAILABLE
    assert refused.value.message == f"backend 'broken' cannot be imported: {text}"


def test_settings_of_a_backend_stand_before_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"": {"threads": "1", "verbose": "1"}, "quick": {"threads": "2"}}
    loader = loader_of(monkeypatch, Creation("quick", Runtime), settings=settings)
    assert loader.get("quick").settings == {"threads": "2", "verbose": "1"}


class OnHost(Runtime):
    """A build for CPUs."""

    @property
    def computes_on_gpus(self) -> bool:
        return False


class Outdated(Runtime):
    """A backend as release 0.1 had them."""

    def facts(self) -> Sequence[Fact]:  # type: ignore[override]  # replaced by a property
        return ()


def test_a_method_that_the_seam_no_longer_has_fails_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = loader_of(monkeypatch, Creation("old", Outdated))
    with pytest.raises(InferenceError) as refused:
        loader.get("old")
    assert refused.value.code is Code.UNAVAILABLE
    assert refused.value.message == (
        f"'{__name__}.Outdated' has the method 'facts', which gateway.backend.Backend no longer "
        "has; define the property 'facts' instead"
    )


@pytest.mark.parametrize("seam", [Backend, Instance])
def test_every_replaced_method_is_named_with_its_replacement(
    seam: type[Backend | Instance],
) -> None:
    bare = dict.fromkeys(seam.__abstractmethods__)
    for name, fix in REPLACED_METHODS[seam].items():
        outdated = type("Outdated", (seam,), {**bare, name: lambda self: None})
        with pytest.raises(InferenceError, match=re.escape(f"'{name}'") + f".*{re.escape(fix)}"):
            refuse_replaced_methods(outdated(), seam)
        present = type("Present", (seam,), {**bare, name: property(lambda self: None)})
        refuse_replaced_methods(present(), seam)


def test_a_backend_that_fails_counts_as_one_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down() -> Backend:
        raise ImportError("libcudart.so.13")

    made = {"host": OnHost, "any": Runtime, "broken": break_down}
    backends = loader_of(monkeypatch, *(Creation(name, make) for name, make in made.items()))
    assert not backends.computes_on_gpus("host")
    assert backends.computes_on_gpus("any")
    assert backends.computes_on_gpus("broken")  # its load gives the reason
    assert backends.computes_on_gpus("of a folder")


# Backends written in Python.


def written_in_python(directory: Path, *names: str) -> Path:
    """A --backend-directory with such backends, and a folder that is none."""
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "model.py").touch()
    (directory / "empty").mkdir(parents=True)
    return directory


def config(backend: str, runtime: str = "") -> ModelConfig:
    return ModelConfig(name="m", backend=backend, runtime=runtime)


def test_a_folder_with_a_model_py_is_a_backend_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = written_in_python(tmp_path / "backends", "shout", "whisper")
    python = Creation("python", Runtime)
    settings = {"": {"a": "0"}, "python": {"b": "1"}, "shout": {"c": "2"}}
    loader = loader_of(
        monkeypatch, python, settings=settings, kept=tmp_path / "kept", directory=directory
    )
    shout, whisper = loader.of(config("shout")), loader.of(config("whisper"))
    # All are copies of one, and share what that keeps.
    assert python.created == [loader.get("python")]
    assert shout is not whisper
    assert (shout.home, whisper.home) == (directory / "shout", directory / "whisper")
    assert shout.kept == tmp_path / "kept" / "python"
    assert shout.settings == {"a": "0", "c": "2"}
    assert loader.of(config("shout")) is shout
    assert loader.of(config("python")).home is None


@pytest.mark.parametrize(
    ("runtime", "in_python"), [("", False), ("libtriton_quick.so", False), ("model.py", True)]
)
def test_the_runtime_chooses_where_a_backend_is_installed_and_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str, in_python: bool
) -> None:
    directory = written_in_python(tmp_path, "quick")
    points = Creation("quick", Runtime), Creation("python", Runtime)
    found = loader_of(monkeypatch, *points, directory=directory).of(config("quick", runtime))
    assert [len(each.created) for each in points] == [not in_python, in_python]
    assert (found.home is not None) is in_python


def test_the_python_backend_itself_may_be_named_with_its_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = loader_of(monkeypatch, Creation("python", Runtime))
    assert loader.of(config("python", "model.py")) is loader.get("python")


@pytest.mark.parametrize(
    ("backend", "runtime", "text"),
    [
        (
            "quick",
            "model.py",
            "unable to find Python backend based backend library 'model.py' for model 'm', "
            "searched: 'quick' in the --backend-directory",
        ),
        ("quick", "libtriton_other.so", "model 'm' asks for runtime 'libtriton_other.so'"),
        ("empty", "", "unable to find backend 'empty'"),
        ("..", "", "unable to find backend '..'"),
        ("../backends/shout", "", "unable to find backend '../backends/shout'"),
        ("shout\0", "", "unable to find backend"),
        ("s" * 1000, "", "unable to find backend"),
    ],
)
def test_a_backend_that_is_no_folder_with_a_model_py_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, runtime: str, text: str
) -> None:
    directory = written_in_python(tmp_path / "backends", "shout")
    (directory / "model.py").touch()
    loader = loader_of(monkeypatch, Creation("quick", Runtime), directory=directory)
    with pytest.raises(InferenceError) as refused:
        loader.of(config(backend, runtime))
    assert refused.value.code is Code.INVALID_ARG
    assert text in refused.value.message
    assert str(tmp_path) not in refused.value.message


def test_a_folder_that_appears_and_goes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = loader_of(monkeypatch, Creation("python", Runtime), directory=tmp_path)
    with pytest.raises(InferenceError, match="unable to find backend 'shout'"):
        loader.of(config("shout"))
    written_in_python(tmp_path, "shout")
    assert loader.of(config("shout")).home == tmp_path / "shout"
    (tmp_path / "shout" / "model.py").unlink()
    with pytest.raises(InferenceError, match="unable to find backend 'shout'"):
        loader.of(config("shout"))


def test_a_backend_of_triton_that_is_not_served_has_its_replacement() -> None:
    with pytest.raises(InferenceError) as caught:
        BackendLoader().get("dali")
    assert caught.value.code is Code.UNSUPPORTED
    assert caught.value.message == (
        "backend 'dali' is not served here: run the pipeline in a Python model, or decode pictures "
        "in an ensemble"
    )
