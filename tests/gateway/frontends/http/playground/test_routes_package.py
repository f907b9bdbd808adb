"""An installed wheel has the page with all its files, and no more of it than the source."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.serving import ROOT

ASSETS = "gateway/frontends/http/playground/assets"
SOURCES = ("pyproject.toml", "README.md", "gateway", "backends")
BUILD = "from setuptools import build_meta; build_meta.build_wheel({folder!r})"
READ = (
    "from gateway.frontends.http.playground import routes;"
    "print(routes.__file__, *sorted(routes.read_assets()), sep='\\n')"
)


def run(program: str, folder: Path) -> str:
    """The output of a program that sees the packages in a folder first."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_an_installed_wheel_serves_the_same_page(tmp_path: Path) -> None:
    source, built, installed = tmp_path / "source", tmp_path / "built", tmp_path / "installed"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    run(BUILD.format(folder=str(built)), source)
    (wheel,) = built.iterdir()
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
    module, *names = run(READ, installed).split()
    assert Path(module).is_relative_to(installed)
    wanted = sorted((ROOT / ASSETS).iterdir())
    assert names == [path.name for path in wanted]
    for path in wanted:
        assert (installed / ASSETS / path.name).read_bytes() == path.read_bytes()
