"""The ranges of versions: by a checkout, else by the installed metadata."""

from pathlib import Path

import pytest

from gateway.tools.doctor.packages import CORE, declared
from tests.packages import Site

PROJECT = """
[project]
requires-python = ">=3.11"
dependencies = ["numpy>=2.0", "winonly>=1; sys_platform == 'win32'"]
[project.optional-dependencies]
cpu = ["torch==2.13.0"]
"""
METADATA = """Metadata-Version: 2.4
Name: sluice
Version: 9
Requires-Python: >=3.11
Requires-Dist: numpy>=2.0
Requires-Dist: winonly>=1; sys_platform == 'win32'
Provides-Extra: cpu
Requires-Dist: torch==2.13.0; extra == 'cpu'
"""


def check(project: Path) -> None:
    found = declared(project)
    assert found is not None
    assert found.python == ">=3.11"
    assert [str(each) for each in found.requirements[CORE]] == ["numpy>=2.0"]
    assert [each.name for each in found.requirements["cpu"]] == ["torch"]


def test_a_checkout_declares_the_ranges(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(PROJECT)
    check(project)


def test_installed_metadata_declares_the_ranges_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Site(tmp_path).install("sluice", {})
    (tmp_path / "sluice-9.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    check(tmp_path / "none.toml")


def test_our_own_project_is_read() -> None:
    found = declared()
    assert found is not None
    assert {"cpu", "cuda", "trtllm"} <= set(found.requirements)
