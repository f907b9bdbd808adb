"""Executions: the rows of several requests in one call of the estimator."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_worker.errors import first_line

from .contract import EstimatorContract
from .inputs import InvalidRows, stacked
from .outputs import InvalidOutput, array_of, tensor

OF_VALUES = (TypeError, ValueError)
"""Errors by which estimators refuse rows."""


@dataclass(frozen=True)
class _Part:
    """One request: its rows, and its place in the execution."""

    index: int
    rows: Any


@dataclass
class _Answers:
    """The responses of an execution, by place."""

    responses: list[Any]
    model: str
    parts: dict[frozenset[str], list[_Part]] = field(default_factory=dict)

    def refuse(self, index: int, why: str, code: int) -> None:
        error = pb_utils.TritonError(f"model '{self.model}': {why}", code)
        self.responses[index] = pb_utils.InferenceResponse(error=error)


def answer(contract: EstimatorContract, requests: Sequence[Any]) -> list[Any]:
    """The responses of requests; those with the same outputs are computed together."""
    answers = _Answers([None] * len(requests), contract.model)
    for index, request in enumerate(requests):
        wanted = frozenset(request.requested_output_names())
        try:
            part = _Part(index, contract.reader.read(request))
            answers.parts.setdefault(wanted, []).append(part)
        except InvalidRows as error:
            answers.refuse(index, str(error), pb_utils.TritonError.INVALID_ARG)
    for wanted, parts in answers.parts.items():
        _compute(contract, sorted(wanted), parts, answers)
    return answers.responses


def _compute(
    contract: EstimatorContract, wanted: Sequence[str], parts: Sequence[_Part], answers: _Answers
) -> None:
    try:
        rows = stacked([each.rows for each in parts])
        arrays = {name: _called(contract, name, rows) for name in wanted}
    except Exception as error:  # noqa: BLE001 - one execution, by foreign code
        if len(parts) > 1:
            # The estimator refuses all for one of them.
            for each in parts:
                _compute(contract, wanted, [each], answers)
            return
        answers.refuse(parts[0].index, *_described(error))
        return
    start = 0
    for each in parts:
        end = start + len(each.rows)
        outputs = [tensor(name, array[start:end]) for name, array in arrays.items()]
        answers.responses[each.index] = pb_utils.InferenceResponse(outputs)
        start = end


def _called(contract: EstimatorContract, name: str, rows: Any) -> Any:
    found = array_of(getattr(contract.estimator, name)(rows), name)
    if len(found) != len(rows):
        raise InvalidOutput(f"'{name}' has {len(found)} rows for {len(rows)} of the request")
    return contract.writer.cast(name, found)


def _described(error: Exception) -> tuple[str, int]:
    if isinstance(error, InvalidOutput):
        return str(error), pb_utils.TritonError.INTERNAL
    if isinstance(error, OF_VALUES):
        return first_line(error), pb_utils.TritonError.INVALID_ARG
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {first_line(error)}", pb_utils.TritonError.INTERNAL
