"""Values that a compiled model does not expect are refused before it reads them."""

import pytest
import torch

from backends.pytorch.signature import SignatureFit, TensorSlot
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype

SLOTS = (
    TensorSlot(names=("x",), datatype=Datatype.FP32, shape=("b", 3), limits=((0, 4),)),
    TensorSlot(names=("y",), datatype=Datatype.INT64, shape=("b", -1)),
    TensorSlot(names=("z",), optional=True),
)


def test_values_that_fit_are_accepted() -> None:
    fit = SignatureFit(SLOTS)
    fit.check([torch.zeros(4, 3), torch.zeros(4, 9, dtype=torch.int64), None])
    fit.check([torch.zeros(0, 3), torch.zeros(0, 1, dtype=torch.int64), ["text"]])


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (torch.zeros(2, 3).double(), None, "'x' has datatype FP64, the model takes FP32"),
        (torch.zeros(2, 3, dtype=torch.complex64), None, "'x' has datatype torch.complex64"),
        (torch.zeros(2, 4), None, "'x' has shape [2,4], the model takes [-1,3]"),
        (torch.zeros(3), None, "'x' has shape [3]"),
        (torch.zeros(()), None, "'x' has shape []"),
        (torch.zeros(5, 3), None, "dimension 0 at most 4"),
        (
            torch.zeros(2, 3),
            torch.zeros(3, 1, dtype=torch.int64),
            "'y' has shape [3,1], the model takes [2,-1]",
        ),
    ],
)
def test_another_datatype_or_shape_is_refused(
    x: torch.Tensor, y: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(InferenceError) as refused:
        SignatureFit(SLOTS).check([x, y, None])
    assert refused.value.code is Code.INVALID_ARG
    assert text in refused.value.message


def test_an_accepted_combination_does_not_admit_another() -> None:
    fit = SignatureFit(SLOTS[:2])
    good = [torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)]
    for _ in range(3):
        fit.check(good)
        for other in ([good[0].double(), good[1]], [good[0], good[1][:1]], [good[0][:1], good[1]]):
            with pytest.raises(InferenceError):
                fit.check(other)


def test_a_combination_with_a_missing_value_does_not_admit_another() -> None:
    """The same tensors in other places are another combination."""
    fit = SignatureFit(SLOTS[1:])
    numbers = torch.zeros(2, 1, dtype=torch.int64)
    fit.check([numbers, None])
    fit.check([None, torch.zeros(7)])
    fit.check([numbers, torch.zeros(7)])
