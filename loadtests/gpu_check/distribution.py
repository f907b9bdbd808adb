"""Sluice as an installed package, for a machine that has nothing but its source.

Backends and vLLM's plug-ins are found by entry points, which only a distribution has.
"""

import importlib.metadata
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "sluice"


def is_installed() -> bool:
    """Whether there is one already."""
    try:
        importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_distribution(folder: Path, project: Path = ROOT / "pyproject.toml") -> None:
    """Make a folder that, on Python's path, tells the entry points of this source."""
    found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": found.get("scripts", {}), **found["entry-points"]}
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(map(_section, groups, groups.values())))


def _section(group: str, points: Mapping[str, str]) -> str:
    lines = (f"{name} = {value}" for name, value in points.items())
    return "\n".join((f"[{group}]", *lines, ""))
