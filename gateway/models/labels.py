"""What are the classes of a model's outputs called?"""

from collections.abc import Mapping
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

Labels = Mapping[str, tuple[str, ...]]
"""The labels of each output that has a label file; the index of a class is its label's."""


def read_labels(config: ModelConfig, folder: Path) -> Labels:
    """The label files that a config names, relative to the model's folder; one label a line.

    Raises UNSUPPORTED for a file outside the folder, INTERNAL for one that cannot be read.
    """
    return {
        output.name: _read(output.label_filename, config.name, folder)
        for output in config.output
        if output.label_filename
    }


def _read(filename: str, model: str, folder: Path) -> tuple[str, ...]:
    path = folder / filename
    if "\0" in filename or not path.resolve().is_relative_to(folder.resolve()):
        raise InferenceError(
            Code.UNSUPPORTED,
            f"label file path '{filename}' is outside model directory of model '{model}'",
        )
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL,
            f"failed to open text file for read {model}/{filename}: {error.strerror}",
        ) from None
    return tuple(text.removesuffix("\n").split("\n")) if text else ()
