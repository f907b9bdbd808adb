"""Padding of inputs to one length, declared in the `parameters` of a config."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS
from gateway.tensor import BF16_BITS, NUMPY_TYPES, Datatype, Tensor, array_tensor

INPUTS = "padded_inputs"
OUTPUTS = "padded_outputs"
BUDGET = "batch_token_budget"
MAX_LENGTH = "max_padded_length"
MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Padding:
    """The padded sequences of one model; none by default.

    `inputs` maps each padded input to its pad value, a number; its length is the first dimension
    after the batch. `outputs` have the padded length as first dimension after the batch, and are
    cut to the length of each request. `token_budget` is the most padded tokens of a batch of
    several requests; 0 to measure it for each instance. The length of a request is 1 to
    `max_length`; None for any.
    """

    inputs: Mapping[str, float] = field(default_factory=lambda: NO_PARAMETERS)
    outputs: frozenset[str] = frozenset()
    token_budget: int = 0
    max_length: int | None = None

    @classmethod
    def read(cls, config: ModelConfig) -> "Padding":
        """The padding a config declares: `padded_inputs` is a JSON object of name to pad value,
        `padded_outputs` a JSON list of names, by default every output whose first dim is -1,
        `batch_token_budget` and `max_padded_length` numbers of at least 1.

        Raises InferenceError INVALID_ARG for another form and for unknown tensors.
        """
        if INPUTS not in config.parameters:
            return cls()
        pads = _json(config, INPUTS)
        if not isinstance(pads, dict) or not all(_is_number(pad) for pad in pads.values()):
            raise _malformed(config, INPUTS, "a JSON object of input names to numbers")
        default = [each.name for each in config.output if each.dims[:1] == (-1,)]
        cut = _json(config, OUTPUTS) if OUTPUTS in config.parameters else default
        if not isinstance(cut, list) or not all(isinstance(name, str) for name in cut):
            raise _malformed(config, OUTPUTS, "a JSON list of output names")
        found = cls(pads, frozenset(cut), _number(config, BUDGET) or 0, _number(config, MAX_LENGTH))
        found._check(config)
        return found

    def _check(self, config: ModelConfig) -> None:
        if not config.batching:
            raise _malformed(config, INPUTS, "max_batch_size to be more than 0")
        flexible = {each.name: each for each in config.input if each.dims[:1] == (-1,)}
        for name in self.inputs:
            if name not in flexible:
                raise _malformed(config, INPUTS, f"'{name}' to be an input whose first dim is -1")
            if flexible[name].optional or flexible[name].allow_ragged_batch:
                raise _malformed(config, INPUTS, f"'{name}' to be neither optional nor ragged")
        known = {each.name for each in config.output if each.dims[:1] == (-1,)}
        for name in self.outputs:
            if name not in known:
                raise _malformed(config, OUTPUTS, f"'{name}' to be an output whose first dim is -1")


def _is_number(pad: object) -> bool:
    return isinstance(pad, int | float) and not isinstance(pad, bool)


def _number(config: ModelConfig, key: str) -> int | None:
    if key not in config.parameters:
        return None
    text = config.parameters[key]
    if not (text.isdecimal() and len(text) <= MOST_DIGITS and int(text)):
        raise _malformed(config, key, f"a number of at least 1, with at most {MOST_DIGITS} digits")
    return int(text)


def _json(config: ModelConfig, key: str) -> object:
    try:
        found: object = json.loads(config.parameters[key])
    except (ValueError, RecursionError):
        raise _malformed(config, key, "JSON") from None
    return found


def _malformed(config: ModelConfig, key: str, expected: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"model '{config.name}': parameter '{key}' is '{config.parameters.get(key, '')}', expected "
        f"{expected}",
    )


def pad(tensors: Sequence[Tensor], length: int, value: Any) -> npt.NDArray[Any]:
    """The rows of all tensors, each padded with `value` to `length`.

    The length is the first dimension after the batch; all others are equal.
    """
    arrays = [tensor.array() for tensor in tensors]
    rows = sum(len(array) for array in arrays)
    whole = np.empty((rows, length, *arrays[0].shape[2:]), dtype=arrays[0].dtype)
    end = 0
    for array in arrays:
        start, end = end, end + len(array)
        whole[start:end, : array.shape[1]] = array
        whole[start:end, array.shape[1] :] = value
    return whole


def pad_value(name: str, datatype: Datatype, number: float) -> Any:
    """The number as an array element of that datatype (BF16: its bits).

    Raises InferenceError INVALID_ARG if the datatype cannot hold it.
    """
    dtype = NUMPY_TYPES[Datatype.FP32] if datatype is Datatype.BF16 else NUMPY_TYPES.get(datatype)
    if dtype is None or not _holds(dtype, number):
        raise InferenceError(
            Code.INVALID_ARG,
            f"padded input '{name}' is padded with {number}, which its datatype {datatype} cannot "
            "hold",
        )
    if datatype is Datatype.BF16:
        return (np.array(number, dtype=dtype).view("<u4") >> 16).astype(BF16_BITS)[()]
    return dtype.type(number)


def _holds(dtype: Any, number: float) -> bool:
    if dtype.kind == "f":
        return not float(np.finfo(dtype).max) < abs(number) < math.inf
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return limits[0] <= number <= limits[1] and number == int(number)


def cut_padded(tensor: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """Parts as of `cut_rows`, each cut to its length: the first dimension after the batch.

    Only parts of several rows that are shorter than the longest are copied.
    """
    array = tensor.array()
    starts = accumulate(rows, initial=0)
    return [
        array_tensor(tensor.name, tensor.datatype, array[start : start + count, :length])
        for start, count, length in zip(starts, rows, lengths, strict=False)
    ]
