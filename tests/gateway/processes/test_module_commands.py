"""Processes of modules find what their parent finds, and nothing in the working directory."""

import subprocess
from pathlib import Path

import pytest

from gateway.processes.module_commands import module_command, module_environment

RUN_SECS = 60.0


def run(module: str, folder: Path) -> str:
    """The output of a module that runs in a folder."""
    found = subprocess.run(
        module_command(module),
        env=module_environment(),
        cwd=folder,
        input="{}",
        capture_output=True,
        text=True,
        timeout=RUN_SECS,
        check=True,
    )
    return found.stdout.strip()


def test_a_file_in_the_working_directory_shadows_no_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    assert run("json.tool", tmp_path) == "{}"


def test_a_module_on_the_parents_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    for folder in (path, elsewhere):
        folder.mkdir()
    (path / "only_here.py").write_text("print('found')")
    monkeypatch.syspath_prepend(path)
    assert run("only_here", elsewhere) == "found"
