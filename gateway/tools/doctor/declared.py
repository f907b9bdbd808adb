"""Which packages, of which versions, does Sluice say that it works with?"""

import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

DISTRIBUTION = "sluice"
CORE = ""
"""Stands for what every installation has, beside the names of extras."""
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Declared:
    """The range of Python versions, and the requirements of each extra and of CORE."""

    python: str
    requirements: Mapping[str, Sequence[Requirement]]


def declared(project: Path = PROJECT) -> Declared | None:
    """By the checkout that this module lies in, else by what is installed; None if by neither.

    A checkout comes first, because what is installed from it in place was written down earlier.
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
