"""Data files that a config names, inside one directory of the model."""

from dataclasses import dataclass
from pathlib import Path

from gateway.errors import Code, InferenceError


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files in the directory `name` of the folder of `model`; `kind` is their name in errors.

    Symbolic links must not point outside the directory.
    """

    model: str
    folder: Path
    name: str
    kind: str

    def read(self, filename: str, most_bytes: int) -> bytes:
        """Read at most that many bytes of a regular file; blocks.


        Raises InferenceError with Triton's text: INTERNAL for a file that cannot be read,
        INVALID_ARG for one outside the directory.
        """
        try:
            inside = (self.folder / self.name).resolve()
            path = (inside / filename).resolve()
            if not path.is_relative_to(inside):
                raise InferenceError(
                    Code.INVALID_ARG,
                    f"{self.kind} file '{filename}' is outside the {self.name} directory of model "
                    f"'{self.model}'",
                )
            if path.exists() and not path.is_file():
                raise self._unreadable(filename, "Not a regular file")
            with path.open("rb") as file:
                return file.read(most_bytes)
        except OSError as error:
            raise self._unreadable(filename, error.strerror) from None
        except (ValueError, RuntimeError):  # a NUL in the name, a loop of links
            raise self._unreadable(filename, "Invalid name") from None

    def _unreadable(self, filename: str, reason: str | None) -> InferenceError:
        return InferenceError(
            Code.INTERNAL,
            f"failed to open text file for read {self.model}/{self.name}/{filename}: {reason}",
        )
