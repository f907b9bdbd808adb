"""The imported TensorRT, missing parts, and its plugins."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.tensorrt.backend import TensorRtBackend
from backends.tensorrt.library import Library, clear
from gateway.errors import Code, InferenceError
from tests import needs
from tests.backends.tensorrt.conftest import NEGATE, STAND_IN, M, save

LEAN = "from tensorrt import *\nfrom tensorrt import __version__\n"
FIX = "`pip install 'sluice[cuda]'` brings TensorRT and CUDA's Python bindings"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, world: Any) -> Any:
    """Have a module not be installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def only(runtime: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another module than `tensorrt` be the installed runtime."""
    (folder / f"{runtime}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_a_missing_tensorrt_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    for name in ("tensorrt", "tensorrt_lean", "tensorrt_dispatch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        Library.find()
    assert str(caught.value) == (
        f"none of tensorrt, tensorrt_lean, tensorrt_dispatch is installed; {FIX}"
    )


def test_a_missing_binding_of_cuda_is_reported_with_its_remedy(without: Any) -> None:
    without("cuda.bindings.runtime")
    with pytest.raises(ImportError) as caught:
        Library.find()
    assert str(caught.value).startswith("import of cuda.bindings.runtime halted")
    assert str(caught.value).endswith(f"; {FIX}")


def test_bindings_without_their_library_are_reported_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Any
) -> None:
    only("tensorrt", "raise ImportError('libnvinfer.so.10: no such file')", tmp_path, monkeypatch)
    with pytest.raises(ImportError) as caught:
        Library.find()
    assert str(caught.value) == (
        "tensorrt is installed, but does not import: libnvinfer.so.10: no such file"
    )


@pytest.mark.parametrize("runtime", ["tensorrt_lean", "tensorrt_dispatch"])
def test_a_lean_runtime_names_the_plans_that_it_reads(
    tmp_path: Path,
    folder: Path,
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
) -> None:
    only(runtime, LEAN, tmp_path, monkeypatch)
    monkeypatch.setattr("backends.tensorrt.library.RUNTIMES", ("missing", runtime))
    backend = TensorRtBackend()
    save(replace(NEGATE, version="10.3.0"), folder)
    with pytest.raises(InferenceError) as caught:
        backend.complete(M, folder)
    assert caught.value.message.endswith(
        f"please rebuild.); {runtime} 10.14.1 reads version-compatible plans alone: build it as "
        "one, or install 'tensorrt'"
    )
    backend.settings = {"version-compatible": "true"}
    save(replace(NEGATE, version="10.3.0", version_compatible=True), folder)
    assert backend.complete(M, folder).max_batch_size == 8


def test_plugins_are_loaded_once_before_the_first_plan(
    backend: TensorRtBackend, folder: Path, tmp_path: Path, world: Any
) -> None:
    compiler = needs.c_compiler()
    (tmp_path / "op.c").write_text("void *getCreators(int *n) { *n = 0; return 0; }\n")
    library = tmp_path / "MyOp.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "op.c"], check=True, timeout=30
    )
    backend.settings = {"plugins": f"libm.so.6; {library}"}
    save(replace(NEGATE, plugins=("MyOp",)), folder)
    for _ in range(2):
        assert backend.complete(M, folder).max_batch_size == 8
    assert world.calls["init_libnvinfer_plugins"] == 1


def test_a_library_of_plugins_that_cannot_be_loaded_is_named(
    backend: TensorRtBackend, folder: Path, tmp_path: Path
) -> None:
    backend.settings = {"plugins": f"{tmp_path}/missing.so"}
    save(NEGATE, folder)
    for _ in range(2):
        with pytest.raises(InferenceError) as caught:
            backend.complete(M, folder)
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message.startswith(
            "--backend-config=tensorrt,plugins: unable to load 'missing.so': missing.so: cannot "
            "open shared object file"
        )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "[runtime.cpp::deserializeCudaEngine::165] Error Code 1: Serialization (bad)",
            "Error Code 1: Serialization (bad)",
        ),
        ("[/src/x/engine.cpp::run::7]   two\n words", "two words"),
        ("cannot open /opt/models/m/1/model.plan: no", "cannot open model.plan: no"),
        ("1/2 of the tactics/kernels", "1/2 of the tactics/kernels"),
    ],
)
def test_clients_read_neither_places_in_sources_nor_folders(said: str, shown: str) -> None:
    assert clear(said) == shown


def test_the_stand_in_is_found_by_these_tests_only() -> None:
    assert str(STAND_IN) not in sys.path
