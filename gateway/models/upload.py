"""The override of a load request: a configuration, and uploaded files."""

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
    """The parameters of a load request.

    `config` is JSON that replaces `config.pbtxt`; `files` are by path, with the prefix `file:`.
    """

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
    """Uploaded files in a private folder, which is deleted after its last `release`.

    It is also deleted when the object is collected. Raises INVALID_ARG for a path outside the
    folder, or for a path that is both a folder and a file.
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
        """Release the folder; the last release deletes it."""
        self._holders -= 1
        if not self._holders:
            self._delete()


def stay_inside(parameter: str) -> str:
    """The normalised path of a parameter `file:<path>`, relative to the model's folder.

    Raises INVALID_ARG for a path outside it (model repository extension, file override).
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
    """Raise INVALID_ARG if a client's config names a file outside the version's folder."""
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
