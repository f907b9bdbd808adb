"""The estimator in a model's file: `.skops`, or a pickle that the operator permits."""

import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice_worker.errors import BadAnswer, first_line

from .trusted_types import TRUSTED

SKOPS = ".skops"
TRUSTED_TYPES = "trusted_types"
"""The parameter of a model with further types of its file."""
OTHER_VERSION = re.compile(r"from version (\S+) when using version (\S+)\.\s")
"""A part of InconsistentVersionWarning."""


class EstimatorFile:
    """The file of a model, which the gateway has permitted."""

    def __init__(self, config: Mapping[str, Any], version_folder: Path) -> None:
        self._model = config["name"]
        self._path = version_folder / config["default_model_filename"]
        parameter = config.get("parameters", {}).get(TRUSTED_TYPES, {}).get("string_value", "")
        self._trusted = frozenset(re.split(r"[\s,]+", parameter)) - {""}
        self._folders = [str(version_folder), str(version_folder.parent)]

    def load(self) -> Any:
        """The estimator; BadAnswer with the reason if it cannot be loaded."""
        is_skops = self._path.suffix == SKOPS
        # A module in the model's folder must not stand in for an optional one of the libraries.
        sys.path[:] = [each for each in sys.path if each not in self._folders]
        library = self._library("skops.io" if is_skops else "joblib")
        self._library("sklearn")
        if self._trusted or not is_skops:
            sys.path.extend(self._folders)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = self._read_skops(library) if is_skops else library.load(self._path)
            except BadAnswer:
                raise
            except (Exception, SystemExit) as error:  # one load, by foreign code
                self._refuse_other_version(warned)
                what = f"{type(error).__name__}: {first_line(error)}"
                raise self._refusal(f"cannot be loaded: {what}") from error
        self._refuse_other_version(warned)
        return found

    def _read_skops(self, io: Any) -> Any:
        trusted = TRUSTED | self._trusted
        try:
            return io.load(self._path, trusted=sorted(trusted))
        except io.exceptions.UntrustedTypesFoundException:
            unknown = sorted(set(io.get_untrusted_types(file=self._path)) - trusted)
            raise self._refusal(
                f"holds types that are not trusted: {', '.join(unknown)}; list them in the "
                f"parameter '{TRUSTED_TYPES}' if you know its origin"
            ) from None

    def _refuse_other_version(self, warned: Sequence[Any]) -> None:
        """Refuse an estimator that another version of scikit-learn saved."""
        for each in warned:
            if found := OTHER_VERSION.search(f"{each.message} "):
                saved, here = found.groups()
                raise self._refusal(
                    f"was saved by scikit-learn {saved}, but its environment has {here}: save it "
                    f"by {here}, or write scikit-learn=={saved} in the model's requirements.txt"
                )

    def _library(self, name: str) -> Any:
        try:
            with _torch_hidden():
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise BadAnswer(
                f"model '{self._model}': its environment has no package '{error.name}'; "
                "pip install 'sluice[sklearn]', or add it to the model's requirements.txt",
                "UNAVAILABLE",
            ) from error

    def _refusal(self, why: str) -> BadAnswer:
        return BadAnswer(f"model '{self._model}': '{self._path.name}' {why}", "INVALID_ARG")


class _HidesTorch:
    """A finder of modules by which there is no torch, unless it has been imported before.

    skops imports each package of scikit-learn; one of them imports torch, for seconds.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for torch, else leave the module to others."""
        if name == "torch":
            raise ModuleNotFoundError(name=name)


@contextmanager
def _torch_hidden() -> Iterator[None]:
    sys.meta_path.insert(0, _HidesTorch)
    try:
        yield
    finally:
        sys.meta_path.remove(_HidesTorch)
