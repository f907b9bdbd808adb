"""A repository in which Triton's Python backend runs the same ONNX file."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from loadtests.rounds import LoadTestFailed

TEMPLATE = Path(__file__).parent / "triton_encoder"


def repository(folder: Path, model: str, onnx: Path, threads: int) -> Path:
    """The folder, with the model in it; LoadTestFailed if the file is not there."""
    if not onnx.exists():
        raise LoadTestFailed(f"{onnx} does not exist; `sluice fetch` makes it")
    shutil.copytree(TEMPLATE, folder / model)
    config = folder / model / "config.pbtxt"
    said = {"model": str(onnx), "packages": str(packages()), "threads": str(threads)}
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in said.items()
    ]
    config.write_text("\n".join([config.read_text(), *lines, ""]))
    return folder


def packages() -> Path:
    """Where onnxruntime is installed: Triton's Python has none of its own."""
    found = find_spec("onnxruntime")
    if found is None or found.origin is None:
        raise LoadTestFailed("onnxruntime is not installed")
    return Path(found.origin).parent.parent
