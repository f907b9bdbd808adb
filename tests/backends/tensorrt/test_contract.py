"""Stand-ins have the signatures of the real packages. Runs where these are installed."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.tensorrt.cuda import LASTING

STAND_IN = Path(__file__).parent / "stand_in"
BUILDING = ("INetworkDefinition", "IBuilderConfig", "IOptimizationProfile")
MADE_BY_THE_LIBRARY = ("ICudaEngine", "IExecutionContext", "IPluginRegistry", *BUILDING)
CLASSES = ("Runtime", "Builder", "ILogger", *MADE_BY_THE_LIBRARY)
ENUMS = (
    "ActivationType",
    "BuilderFlag",
    "MatrixOperation",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "TensorFormat",
    "TensorIOMode",
    "TensorLocation",
)
ATTRIBUTES = (
    ("Runtime", "engine_host_code_allowed"),
    ("Runtime", "DLA_core"),
    ("Runtime", "num_DLA_cores"),
    ("ICudaEngine", "num_io_tensors"),
    ("ICudaEngine", "num_optimization_profiles"),
    ("ICudaEngine", "device_memory_size_v2"),
)

DUMP = f"""
import enum, inspect, json
import tensorrt
from cuda.bindings import runtime

def names(function):
    return [each for each in inspect.signature(function).parameters if each != "self"]

def methods(made):
    shown = (n for n in vars(made) if not n.startswith("_") or n == "__init__")
    return {{n: names(vars(made)[n]) for n in shown if inspect.isfunction(vars(made)[n])}}

print(json.dumps({{
    "classes": {{name: methods(getattr(tensorrt, name)) for name in {CLASSES!r}}},
    "allocator": methods(tensorrt.IOutputAllocator),
    "enums": {{name: [m.name for m in getattr(tensorrt, name)] for name in {ENUMS!r}}},
    "severities": [each.name for each in tensorrt.ILogger.Severity],
    "cuda": {{n: names(f) for n, f in vars(runtime).items()
              if n.startswith("cuda") and inspect.isfunction(f)}},
    "cuda enums": {{n: {{m.name: int(m) for m in e}} for n, e in vars(runtime).items()
                    if n.startswith("cuda") and isinstance(e, enum.EnumMeta)}},
    "numbers": {{n: v for n, v in vars(runtime).items()
                if n.startswith("cuda") and isinstance(v, int)}},
}}))
"""


@pytest.fixture(scope="module")
def stand_in() -> Mapping[str, Any]:
    """The names of the stand-ins, from another process: real modules have the same names."""
    shown = subprocess.run(
        [sys.executable, "-c", DUMP],
        cwd=STAND_IN,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found: Mapping[str, Any] = json.loads(shown)
    return found


def test_the_stand_ins_show_their_signatures(stand_in: Mapping[str, Any]) -> None:
    made = stand_in["classes"]["ICudaEngine"]
    assert made["get_tensor_profile_shape"] == ["name", "profile_index"]
    assert stand_in["cuda"]["cudaMallocAsync"] == ["size", "hStream"]


def test_tensorrt_has_the_signatures_of_the_stand_in(stand_in: Mapping[str, Any]) -> None:
    real = pytest.importorskip("tensorrt")
    for name, methods in stand_in["classes"].items():
        for method, parameters in methods.items():
            if name in MADE_BY_THE_LIBRARY and method == "__init__":
                continue
            overloads = _overloads(getattr(getattr(real, name), method).__doc__)
            assert parameters in overloads, f"{name}.{method}"
    for name, members in stand_in["enums"].items():
        assert set(members) <= set(getattr(real, name).__members__), name
    assert set(stand_in["severities"]) == set(real.ILogger.Severity.__members__)
    for name, attribute in ATTRIBUTES:
        assert hasattr(getattr(real, name), attribute), f"{name}.{attribute}"


def test_output_allocators_have_the_methods_of_the_stand_in(stand_in: Mapping[str, Any]) -> None:
    real = pytest.importorskip("tensorrt")
    for method, parameters in stand_in["allocator"].items():
        if method != "__init__":
            shown = f"def {method}({', '.join(['self', *parameters])}):"
            assert shown in real.IOutputAllocator.__doc__


def test_cuda_has_the_signatures_of_the_stand_in(stand_in: Mapping[str, Any]) -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    for name, parameters in stand_in["cuda"].items():
        found = list(inspect.signature(getattr(real, name)).parameters)
        assert found == parameters, name
    for name, members in stand_in["cuda enums"].items():
        shown = {each.name: int(each) for each in getattr(real, name)}
        assert members.items() <= shown.items(), name
    for name, number in stand_in["numbers"].items():
        assert getattr(real, name) == number, name
    assert {each.name for each in real.cudaError_t} >= LASTING


def _overloads(text: str) -> list[list[str]]:
    """The names of the parameters in each signature that a binding writes down for a function."""
    signatures = re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) -> ", text, re.MULTILINE)
    without_members = [re.sub(r"<[^>]*>", "", each) for each in signatures]
    return [re.findall(r"(\w+): ", each)[1:] for each in without_members]
