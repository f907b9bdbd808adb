"""The inputs and outputs of an estimator, completed and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_worker.errors import BadAnswer
from sluice_worker.tensor import name_of

from .inputs import (
    ANY_SIZE,
    TEXT,
    USUAL_NAME,
    USUAL_TYPE,
    EstimatorInput,
    RowReader,
    expected_dims,
    is_columns,
)
from .outputs import InvalidOutput, OutputWriter, array_of, methods_of, refuse_unknown

MANY = ("predict_proba", "decision_function")
"""Outputs with one value per class."""


@dataclass(frozen=True)
class EstimatorContract:
    """An estimator with the reader of its rows and the writer of its outputs."""

    model: str
    estimator: Any
    reader: RowReader
    writer: OutputWriter


def refuse_no_estimator(model: str, estimator: Any) -> None:
    """Raise BadAnswer for an object that computes nothing."""
    if not methods_of(estimator):
        raise BadAnswer(
            f"model '{model}': its file holds {type(estimator).__name__}, expected a fitted "
            "estimator with predict or transform",
            "INVALID_ARG",
        )


def complete(config: Any, estimator: Any) -> None:
    """Add missing inputs and outputs to a config."""
    known = config.as_dict()
    model, batched = known["name"], bool(known.get("max_batch_size"))
    features = EstimatorInput(estimator)
    listed = {each["name"]: each for each in known.get("input", ())}
    columns = is_columns(list(listed), features)
    names = features.names if columns else list(listed) or [USUAL_NAME]
    dims = expected_dims(features, columns=columns, batched=batched)
    for name in names:
        usual = TEXT if features.texts else USUAL_TYPE
        config.add_input(_tensor(name, listed.get(name, {}), usual, dims))
    methods = methods_of(estimator)
    given = {each["name"]: each for each in known.get("output", ())}
    refuse_unknown(model, list(given), methods)
    found = _returned(estimator, RowReader(config.as_dict(), features), given or methods)
    tensors = [name for name, each in found.items() if not isinstance(each, InvalidOutput)]
    for name in given or tensors:
        config.add_output(_completed_output(name, given.get(name, {}), estimator, found, batched))


def contract(config: Mapping[str, Any], estimator: Any) -> EstimatorContract:
    """The contract of a whole config; BadAnswer if the estimator has another one."""
    model, outputs = config["name"], [each["name"] for each in config.get("output", ())]
    refuse_unknown(model, outputs, methods_of(estimator))
    reader = RowReader(config, EstimatorInput(estimator))
    writer = OutputWriter(config)
    try:
        for name, found in _returned(estimator, reader, outputs).items():
            if isinstance(found, InvalidOutput):
                raise found
            if found is not None:
                writer.cast(name, found)
    except InvalidOutput as error:
        raise BadAnswer(f"model '{model}': {error}", "INVALID_ARG") from None
    return EstimatorContract(model, estimator, reader, writer)


def _tensor(name: str, given: Mapping[str, Any], data_type: str, dims: list[int]) -> dict[str, Any]:
    found = given.get("data_type", "TYPE_INVALID")
    return {
        "name": name,
        "data_type": data_type if found == "TYPE_INVALID" else found,
        "dims": given.get("dims") or dims,
    }


def _returned(estimator: Any, reader: RowReader, names: Any) -> dict[str, Any]:
    """The arrays of these outputs for a row of zeros; None where the estimator refuses the row.

    InvalidOutput stands for what is no tensor.
    """
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = array_of(getattr(estimator, name)(reader.zeros()), name)
        except InvalidOutput as error:
            found[name] = error
        except Exception:  # noqa: BLE001 - zeros need not be among its values
            found[name] = None
    return found


def _completed_output(
    name: str, given: Mapping[str, Any], estimator: Any, found: Mapping[str, Any], batched: bool
) -> dict[str, Any]:
    array: Any = found.get(name)
    classes: Any = getattr(estimator, "classes_", None)
    if hasattr(array, "dtype"):
        data_type, tail = _type(array.dtype), list(array.shape[1:])
    elif name == "predict" and hasattr(classes, "dtype"):
        data_type, tail = _type(classes.dtype), []
    else:
        data_type, tail = USUAL_TYPE, [] if name == "predict" else [ANY_SIZE]
    dims = (tail or [1]) if batched else [ANY_SIZE, *tail]
    return _tensor(name, given, data_type, dims)


def _type(dtype: Any) -> str:
    """The data type of a config; texts are strings."""
    name = "BYTES" if dtype.kind == "U" else name_of(dtype)
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
