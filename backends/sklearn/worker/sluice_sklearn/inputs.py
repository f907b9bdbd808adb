"""Rows of an estimator, made of the inputs of requests."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sluice_worker.errors import BadAnswer
from sluice_worker.tensor import TRITON_STRING_TO_NUMPY

ANY_SIZE = -1
USUAL_NAME, USUAL_TYPE, TEXT = "X", "TYPE_FP64", "TYPE_STRING"
WITHOUT_NUMPY = "TYPE_BF16"


class InvalidRows(Exception):
    """The inputs of a request are no rows of the estimator; the text is for its client."""


class EstimatorInput:
    """The features of an estimator: their number, -1 if unknown, and names, if it knows them.

    `texts`: a row is one text, as vectorizers take it.
    """

    def __init__(self, estimator: Any) -> None:
        self.names = [str(each) for each in getattr(estimator, "feature_names_in_", ())]
        self.width = int(getattr(estimator, "n_features_in_", ANY_SIZE))
        self.texts = self.width == ANY_SIZE and _takes_texts(estimator)


def _takes_texts(estimator: Any) -> bool:
    text = importlib.import_module("sklearn.feature_extraction.text")
    while steps := getattr(estimator, "steps", None):
        estimator = steps[0][1]
    return isinstance(estimator, (text.CountVectorizer, text.HashingVectorizer))


class RowReader:
    """Reads the rows of requests, from one tensor or from one column per feature."""

    def __init__(self, config: Mapping[str, Any], features: EstimatorInput) -> None:
        self._model = config["name"]
        self._features = features
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._listed = list(config.get("input", ()))
        names = [each["name"] for each in self._listed]
        self.columns = is_columns(names, features)
        self._order = features.names if self.columns else names
        self._frames = _data_frames() if features.names else None
        self._check(names)

    def read(self, request: Any) -> Any:
        """The rows of a request: an array, a list of texts, or a data frame."""
        found = {each.name(): _values(each) for each in request.inputs()}
        missing = [name for name in self._order if name not in found]
        if missing:
            raise InvalidRows(f"input '{missing[0]}' is missing")
        return self._rows([found[name] for name in self._order])

    def zeros(self) -> Any:
        """One row of zeros and empty texts, to try the estimator."""
        types = {each["name"]: each["data_type"] for each in self._listed}
        width = 1 if self.columns or self._features.texts else max(self._features.width, 1)
        dtypes = [np.dtype(TRITON_STRING_TO_NUMPY[types[name]]) for name in self._order]
        return self._rows(
            [np.full((1, width), "" if each.hasobject else 0, each) for each in dtypes]
        )

    def _rows(self, tensors: Sequence[Any]) -> Any:
        if self.columns:
            return self._from_columns([_column(name, each) for name, each in self._named(tensors)])
        (rows,) = tensors
        if self._features.texts:
            return _column(self._order[0], rows).tolist()
        if rows.ndim != 2:
            raise InvalidRows(f"input '{self._order[0]}' has {rows.ndim} dimensions, expected 2")
        width = self._features.width
        if width not in (ANY_SIZE, rows.shape[1]):
            raise InvalidRows(
                f"input '{self._order[0]}' has rows of {rows.shape[1]} features, expected {width}"
            )
        if self._frames is None:
            return rows
        return self._frames.DataFrame(rows, columns=self._features.names)

    def _named(self, tensors: Sequence[Any]) -> Any:
        return zip(self._order, tensors, strict=True)

    def _from_columns(self, columns: Sequence[Any]) -> Any:
        sizes = {len(each) for each in columns}
        if len(sizes) > 1:
            raise InvalidRows(f"its columns have {min(sizes)} to {max(sizes)} rows, expected equal")
        if self._frames is not None:
            return self._frames.DataFrame(dict(self._named(columns)))
        return np.stack(np.broadcast_arrays(*columns), axis=1)

    def _check(self, names: Sequence[str]) -> None:
        features = self._features
        if self.columns:
            missing = set(features.names).difference(names)
            if missing:
                raise self._refusal(f"lists columns without '{sorted(missing)[0]}'")
        elif len(names) != 1:
            known = f" or the columns {', '.join(features.names)}" if features.names else ""
            raise self._refusal(f"lists {len(names)} inputs, expected one tensor of rows{known}")
        for each in self._listed:
            self._check_dims(each["name"], dims_of(each))
            if each["data_type"] == WITHOUT_NUMPY:
                raise self._refusal(f"has TYPE_BF16 for input '{each['name']}', which numpy lacks")

    def _check_dims(self, name: str, dims: list[int]) -> None:
        expected = expected_dims(self._features, columns=self.columns, batched=self._batched)
        one_each = (self.columns or self._features.texts) and not self._batched
        if not _agree(dims, expected) and not (one_each and _agree(dims, [*expected, 1])):
            raise self._refusal(
                f"has dims {dims} for input '{name}', but the estimator expects {expected}"
            )

    def _refusal(self, why: str) -> BadAnswer:
        return BadAnswer(f"model '{self._model}': its configuration {why}", "INVALID_ARG")


def dims_of(tensor: Mapping[str, Any]) -> list[int]:
    """The dims of a config's input or output as the model gets them."""
    reshape = tensor.get("reshape")
    return list(tensor["dims"] if reshape is None else reshape.get("shape", ()))


def is_columns(names: Sequence[str], features: EstimatorInput) -> bool:
    """Whether inputs of these names are columns of the estimator."""
    return bool(names) and set(names) <= set(features.names)


def expected_dims(features: EstimatorInput, *, columns: bool, batched: bool) -> list[int]:
    """The dims of an input: of one column, of one text, or of all features."""
    if columns or features.texts:
        return [1] if batched else [ANY_SIZE]
    return [features.width] if batched else [ANY_SIZE, features.width]


def _agree(dims: Sequence[int], expected: Sequence[int]) -> bool:
    return len(dims) == len(expected) and all(
        one == other or ANY_SIZE in (one, other) for one, other in zip(dims, expected, strict=True)
    )


def _values(tensor: Any) -> Any:
    """The elements; texts as `str`."""
    found = tensor.as_numpy()
    if found.dtype != object:
        return found
    try:
        texts = [each.decode() for each in found.ravel().tolist()]
    except UnicodeDecodeError:
        raise InvalidRows(f"input '{tensor.name()}' holds bytes that are no UTF-8") from None
    made = np.empty(len(texts), dtype=object)
    made[:] = texts
    return made.reshape(found.shape)


def _column(name: str, found: Any) -> Any:
    if found.size != len(found):
        raise InvalidRows(f"input '{name}' has shape {list(found.shape)}, expected one per row")
    return found.reshape(-1)


def _data_frames() -> Any:
    """The package pandas, None without it; an estimator that was fitted with names gets frames."""
    try:
        return importlib.import_module("pandas")
    except ImportError:
        return None


def stacked(parts: Sequence[Any]) -> Any:
    """The rows of several requests as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return [text for part in parts for text in part]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return importlib.import_module("pandas").concat(parts, ignore_index=True)
