"""How does a tensor go from a model that batches to one that does not, and back?"""

from collections.abc import Sequence

Shape = tuple[int, ...]
ANY_SIZE = -1


def converted(shape: Shape, rows: int, dims: Sequence[int], *, batching: bool) -> Shape:
    """The shape in which a tensor goes to where `dims` are expected, after a batch if `batching`.

    `rows` is the batch size with which it was made, 0 for none. A batch of one may be added or
    left out where the shapes do not agree as they are; what then does not fit is refused later.
    """
    if batching == bool(rows):
        return shape
    if batching:
        return (1, *shape) if agree(dims, shape) else shape
    return shape[1:] if rows == 1 and not agree(dims, shape) else shape


def agree(dims: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two shapes may be of the same tensor; -1 is any size on either side."""
    return len(dims) == len(others) and all(
        one == other or ANY_SIZE in (one, other) for one, other in zip(dims, others, strict=True)
    )
