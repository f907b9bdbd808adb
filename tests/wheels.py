"""Wheels made on the spot, so that nothing is fetched when an environment is made in a test."""

import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

# What stands for numpy in an environment without an index: the one of these tests.
NUMPY = """import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "numpy", {init!r}, submodule_search_locations=[{folder!r}]
)
sys.modules["numpy"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["numpy"])
"""


def write_wheel(folder: Path, name: str, files: Mapping[str, str], version: str = "1.0") -> Path:
    """A pure wheel with those files; each call makes the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    whole = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    whole[f"{about}/RECORD"] = "".join(f"{each},,\n" for each in (*whole, f"{about}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for each, text in whole.items():
            wheel.writestr(zipfile.ZipInfo(each), text)
    return path


def write_numpy(folder: Path) -> Path:
    """A wheel called numpy, which is the numpy of the tests' own environment."""
    found = find_spec("numpy")
    assert found is not None
    assert found.origin is not None
    text = NUMPY.format(init=found.origin, folder=str(Path(found.origin).parent))
    return write_wheel(folder, "numpy", {"numpy/__init__.py": text}, "2.0")
