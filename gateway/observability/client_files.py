"""Log and trace files that clients name: known ones, and those below a folder of the operator."""

from collections.abc import Collection
from pathlib import Path

from gateway.errors import Code, InferenceError

SHOWN_CHARS = 256


def client_file(wanted: object, known: Collection[str], directory: str, kind: str) -> str:
    """The path of a log or trace file that a client names.

    `known` are the files of the command line and those in use. Others are below `directory`, by a
    relative or an absolute path. Raises UNSUPPORTED with Triton's text without a directory,
    INVALID_ARG for a path outside.
    """
    if isinstance(wanted, str) and wanted in known:
        return wanted
    if not directory or not isinstance(wanted, str):
        text = f"{kind} file location can not be updated through network protocol"
        raise InferenceError(Code.UNSUPPORTED, text)
    path = _inside(Path(directory), wanted)
    if path is None:
        raise refused_file(wanted, kind, "expected a file below the folder of --log-directory")
    return str(path)


def refused_file(name: str, kind: str, reason: str) -> InferenceError:
    """The error for a file that cannot be used, without its folder."""
    shown = Path(name).name[:SHOWN_CHARS]
    return InferenceError(Code.INVALID_ARG, f"{kind} file '{shown}': {reason}")


def _inside(folder: Path, name: str) -> Path | None:
    """The path behind all links, if it may be a file below the folder."""
    if not name.isprintable():
        return None
    try:
        whole = folder.resolve()
        path = (whole / name).resolve()
        is_free = path.parent.is_dir() and (path.is_file() or not path.exists())
    except (OSError, RuntimeError):  # a long name, a circle of links
        return None
    return path if is_free and whole in path.parents else None
