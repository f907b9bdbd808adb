"""A source that is not installed has the entry points that it would have."""

import tomllib
from importlib.metadata import distributions
from pathlib import Path

from loadtests.gpu_check.distribution import ROOT, write_distribution


def test_the_entry_points_are_those_of_the_project(tmp_path: Path) -> None:
    write_distribution(tmp_path / "site")
    (found,) = distributions(path=[str(tmp_path / "site")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        assert {each.name: each.value for each in found.entry_points.select(group=group)} == points
    assert found.name == "sluice"
