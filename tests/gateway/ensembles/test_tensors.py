"""Tensors between models that batch and models that do not."""

import pytest

from gateway.ensembles.tensors import converted


@pytest.mark.parametrize(
    ("shape", "rows", "dims", "batching", "expected"),
    [
        ((3, 2), 3, (2,), True, (3, 2)),
        ((2,), 0, (2,), False, (2,)),
        ((2,), 0, (2,), True, (1, 2)),
        ((5, 2), 0, (2,), True, (5, 2)),
        ((1, 2), 1, (2,), False, (2,)),
        ((1, 2), 1, (1, 2), False, (1, 2)),
        ((3, 2), 3, (-1, 2), False, (3, 2)),
        ((3, 2), 3, (2,), False, (3, 2)),
        ((4,), 0, (-1,), True, (1, 4)),
    ],
)
def test_a_batch_dimension_of_one_is_added_or_removed_where_shapes_disagree(
    shape: tuple[int, ...],
    rows: int,
    dims: tuple[int, ...],
    batching: bool,
    expected: tuple[int, ...],
) -> None:
    assert converted(shape, rows, dims, batching=batching) == expected
