"""Is the shape that a config gives a tensor that of the model? Triton's rule, and its texts."""

from collections.abc import Iterator, Sequence

from gateway.tensor import format_shape


def whole_shape_problems(
    model: str, tensor: str, found: Sequence[int], dims: Sequence[int]
) -> Iterator[str]:
    """Where the model's shape `found` is not the one configured, without a batch dimension."""
    if not _agree(found, dims):
        yield f"{_difference(model, tensor, found, dims)} (shape {format_shape(dims)})"


def batched_shape_problems(
    model: str, tensor: str, found: Sequence[int], dims: Sequence[int]
) -> Iterator[str]:
    """Where the model's shape `found` is not a batch dimension and those configured."""
    whole = (-1, *dims)
    if not _agree(found, whole):
        yield (
            f"{_difference(model, tensor, found, whole)} (an initial batch dimension "
            "because max_batch_size > 0 followed by the explicit tensor shape, making complete "
            f"shape {format_shape(whole)})"
        )


def _difference(model: str, tensor: str, found: Sequence[int], dims: Sequence[int]) -> str:
    return (
        f"model '{model}', tensor '{tensor}': the model expects {len(found)} dimensions "
        f"(shape {format_shape(found)}) but the model configuration specifies {len(dims)} "
        "dimensions"
    )


def _agree(found: Sequence[int], dims: Sequence[int]) -> bool:
    return len(found) == len(dims) and all(
        -1 in (one, other) or one == other for one, other in zip(found, dims, strict=True)
    )
