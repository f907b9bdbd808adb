"""Model repositories with the same models for the gateway and for Triton."""

import json
import random
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import orjson

from loadtests.support.rounds import LoadTestFailed
from loadtests.support.texts import SEED, lengths

HERE = Path(__file__).parents[1]
OURS = HERE.parent / "model_repository"
SHARED = (HERE / "triton_models", HERE / "python_models")
ADD_SUB_PATH = "/v2/models/add_sub/infer"
ADD_SUB_BODY = orjson.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)
"""One request to add_sub, 16 floats for each input, as JSON."""
ENSEMBLE, ENCODER = "embed_text", "minilm"
STEPS = ("tokenizer", "pooling")
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Each is one token."""
PINNED = 'parameters { key: "cpu_pinning" value { string_value: "1" } }\n'
WITH_PACKAGES = """import sys

sys.path.append({packages!r})
from own import TritonPythonModel  # noqa: E402
"""


def of_gateway(folder: Path) -> Path:
    """The repository for the gateway: minilm of the ensemble is on ONNX Runtime."""
    _write_shared(folder)
    write_encoder(folder)
    return folder


def write_encoder(folder: Path) -> None:
    """Add the encoder to a repository for the gateway, as where nothing else is served."""
    shutil.copytree(OURS / ENCODER, folder / ENCODER)
    with (folder / ENCODER / "config.pbtxt").open("a") as config:
        config.write(PINNED)


def of_triton(folder: Path, onnx: Path, threads: int) -> Path:
    """The repository for Triton: minilm of the ensemble is ONNX Runtime in a Python model.

    Its Python has no packages but numpy, so models find ours; model.py is the same.
    """
    _write_shared(folder)
    repository(folder, ENCODER, onnx, threads)
    _answer_hidden_states(folder / ENCODER / "config.pbtxt")
    for name in STEPS:
        (folder / name / "1" / "model.py").rename(folder / name / "1" / "own.py")
        text = WITH_PACKAGES.format(packages=str(packages()))
        (folder / name / "1" / "model.py").write_text(text)
    _replace(folder / "tokenizer" / "config.pbtxt", '"all-minilm-l6-v2-onnx"', f'"{onnx.parent}"')
    return folder


def with_ensemble(folder: Path) -> Path:
    """A repository for the gateway with the ensemble and what it is made of, and nothing else."""
    for name in (ENSEMBLE, ENCODER, *STEPS):
        shutil.copytree(OURS / name, folder / name)
    return folder


def texts(count: int) -> list[str]:
    """Texts of log-normal lengths, always the same."""
    random_ = random.Random(SEED)
    return [" ".join(random_.choices(WORDS, k=length)) for length in lengths(count)]


def write_texts(path: Path, count: int) -> None:
    """A file for perf_analyzer's `--input-data` with these texts."""
    data = [{"text": {"content": [text], "shape": [1]}} for text in texts(count)]
    path.write_text(json.dumps({"data": data}))


def _write_shared(folder: Path) -> None:
    models = [model for each in SHARED for model in each.iterdir() if model.is_dir()]
    for model in (*models, *(OURS / name for name in (ENSEMBLE, *STEPS))):
        shutil.copytree(model, folder / model.name)


def _answer_hidden_states(config: Path) -> None:
    """The template answers the embedding, the ensemble wants what it is made of."""
    _replace(
        config,
        r'"sentence_embedding" data_type: TYPE_FP32 dims: \[',
        ('"last_hidden_state" data_type: TYPE_FP32 dims: [ -1,'),
    )


def _replace(file: Path, pattern: str, by: str) -> None:
    text, found = re.subn(pattern, lambda _: by, file.read_text())
    if found != 1:
        raise LoadTestFailed(f"{file} has another form than expected")
    file.write_text(text)


TEMPLATE = HERE / "triton_encoder"


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
