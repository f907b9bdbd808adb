"""Packages: the extra of a machine, missing packages, and versions out of range."""

import pytest
from packaging.requirements import Requirement

from gateway.tools.doctor.packages import (
    CORE,
    Declared,
    Versions,
    core,
    extra_in_use,
    findings,
    optional,
    python,
)
from gateway.tools.doctor.report import Health

TORCH = Requirement("torch==2.13.0")
DECLARED = Declared(
    ">=3.11",
    {CORE: [Requirement("numpy>=2")], "cpu": [TORCH], "cuda": [Requirement("vllm>=0.32,<0.33")]},
)


@pytest.mark.parametrize(
    ("versions", "has_gpu", "extra"),
    [
        ({}, False, "cpu"),
        ({"onnxruntime": "1.23"}, False, "cpu"),
        ({}, True, "cuda"),
        ({"vllm": "0.32.0"}, False, "cuda"),
        ({"tensorrt-llm": "1.2.0"}, True, "trtllm"),
    ],
)
def test_the_extra_is_that_of_the_machine(versions: Versions, has_gpu: bool, extra: str) -> None:
    assert extra_in_use(versions, has_gpu) == extra


@pytest.mark.parametrize(
    ("versions", "verdict", "found"),
    [
        ({"torch": "2.13.0+cpu"}, Health.OK, "2.13.0+cpu"),
        ({"torch": "2.11.0"}, Health.WARNING, "2.11.0"),
        ({}, Health.CANNOT, "not installed"),
    ],
)
def test_a_package_of_an_extra(versions: Versions, verdict: Health, found: str) -> None:
    finding = optional(TORCH, versions)
    assert (finding.verdict, finding.found) == (verdict, found)
    assert ("pip install 'torch==2.13.0'" in finding.fix) == (verdict is not Health.OK)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("3.10.9", Health.BROKEN),
        ("3.11.0", Health.OK),
        ("3.14.0", Health.BROKEN),
    ],
)
def test_python_has_a_range(version: str, verdict: Health) -> None:
    assert python(">=3.11,<3.14", version).verdict is verdict


@pytest.mark.parametrize("versions", [{}, {"numpy": "1.26.4"}])
def test_without_what_the_gateway_needs_it_is_broken(versions: Versions) -> None:
    bad, rest = core(DECLARED.requirements[CORE], versions)
    assert (bad.what, bad.verdict, bad.fix) == (
        "numpy",
        Health.BROKEN,
        "pip install 'numpy>=2'",
    )
    assert rest.found == "0 of 1 are fine"


def test_torch_is_a_finding_also_without_a_declared_range() -> None:
    versions = {"numpy": "2.1", "torch": "2.11.0", "vllm": "0.32.1"}
    told = {each.what: each.found for each in findings(DECLARED, versions, has_gpu=True)}
    assert told["torch"] == "2.11.0"
    assert told["vllm"] == "0.32.1"


def test_two_builds_of_onnxruntime_are_one_too_many() -> None:
    versions = {"numpy": "2.1", "onnxruntime": "1.23", "onnxruntime-gpu": "1.23"}
    *_, last = findings(DECLARED, versions, has_gpu=True)
    assert last.verdict is Health.WARNING
    assert "overwrites" in last.found
