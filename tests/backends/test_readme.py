"""The complete example of the page of backends."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.serving import ROOT


def test_the_example_of_a_backend_passes_its_own_tests(tmp_path: Path) -> None:
    page = (ROOT / "backends/README.md").read_text()
    files = dict(re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", page, re.DOTALL))
    assert list(files) == ["pyproject.toml", "shout.py", "test_shout.py"]
    assert sum(text.count("\n") for text in files.values()) < 120
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    install(tomllib.loads(files["pyproject.toml"])["project"], tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "."],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout


def install(project: dict[str, object], folder: Path) -> None:
    """Write the metadata of `pip install` for importlib.metadata."""
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]
    assert isinstance(points, dict)
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
