"""What a load request brings along: a configuration, and files in place of the repository's."""

import posixpath
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.private_folder import PrivateFolder

FILE_PREFIX = "file:"


@dataclass(frozen=True, slots=True)
class Override:
    """`config`: JSON in place of `config.pbtxt`; `files`: by path, with the prefix `file:`."""

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def require_config(self) -> str:
        """The configuration; INVALID_ARG if there are only files."""
        if self.config is None:
            raise InferenceError(
                Code.INVALID_ARG,
                "Load parameter 'config' must be specified for model file override",
            )
        return self.config


class UploadedFolder:
    """Uploaded files in a private folder, which goes when the last one that holds it has let go.

    It also goes when nobody knows it any more, as when the server ends while it is filled. Raises
    INVALID_ARG for a path that leaves the folder, or that is folder and file at once.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        paths = {stay_inside(name): data for name, data in files.items()}
        folder = _private_folder()
        self.path = folder.path
        self._delete = weakref.finalize(self, folder.remove)
        self._holders = 1
        try:
            for relative, data in paths.items():
                _write(self.path, relative, data)
        except BaseException:
            self.release()
            raise

    def hold(self) -> None:
        """Keep the folder until one more `release`."""
        self._holders += 1

    def release(self) -> None:
        """Let go; the last one to do so deletes the folder."""
        self._holders -= 1
        if not self._holders:
            self._delete()


def stay_inside(parameter: str) -> str:
    """The path in the model's folder that a parameter `file:<path>` names, normalised.

    Raises INVALID_ARG if it leaves the folder (model repository extension, file override).
    """
    name = parameter.removeprefix(FILE_PREFIX)
    normal = posixpath.normpath(name.lstrip("/") or ".")
    if normal in (".", "..") or normal.startswith("../") or "\0" in name:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Invalid file parameter '{parameter}' with normalized path '{normal}' must stay "
            "within model directory.",
        )
    return normal


def refuse_escapes(config: ModelConfig) -> None:
    """Raise INVALID_ARG if a client's config names a model file outside the version's folder."""
    for name in (config.default_model_filename, *config.cc_model_filenames.values()):
        if name.startswith("/") or ".." in name.split("/"):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model file '{name}' of model '{config.name}' must stay within the version's "
                "folder",
            )


def _private_folder() -> PrivateFolder:
    try:
        return PrivateFolder.make("sluice-upload-")
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL, f"no folder can be made for uploaded files: {error.strerror}"
        ) from None


def _write(folder: Path, relative: str, data: bytes) -> None:
    try:
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InferenceError(
            Code.INVALID_ARG, f"file parameter 'file:{relative}' cannot be written: {reason}"
        ) from None
