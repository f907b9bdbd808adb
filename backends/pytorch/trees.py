"""What are the names of the tensors in nested arguments and results? (`.pt2` call specs)

A program that was exported takes and gives its tensors as one flat list; its call spec says how
they nest. Triton calls the leaves ARGS[i], KWARGS[k] and RESULT[..], with as many brackets as
there are levels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils._pytree as pytree

from backends.pytorch.signature import Slot, numbered


def input_slots(spec: Any, argument_names: Sequence[str] = ()) -> tuple[Slot, ...]:
    """A slot for each leaf of an input spec, which nests (args, kwargs).

    `argument_names` are those of `forward()`, if they are known.
    """
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    shallow = dict(zip(argument_names, args, strict=False)) | kwargs
    aliases = {place: name for name, place in shallow.items() if isinstance(place, int)}
    arguments = [*args, *kwargs.values()]
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        aliases |= {place: key for key, place in arguments[0].items() if isinstance(place, int)}
    paths = {place: path for path, place in [*_paths(args, "ARGS"), *_paths(kwargs, "KWARGS")]}
    return tuple(
        Slot(names=tuple(filter(None, (aliases.get(place), f"INPUT__{place}", paths[place]))))
        for place in range(spec.num_leaves)
    )


def output_slots(spec: Any) -> tuple[Slot, ...]:
    """A slot for each leaf of an output spec; the keys of a dict are names as well."""
    try:
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    except (TypeError, ValueError, KeyError):
        return numbered("OUTPUT", spec.num_leaves)  # a type that only its own library builds
    keys = tree if isinstance(tree, dict) else {}
    aliases = {place: str(key) for key, place in keys.items() if isinstance(place, int)}
    paths = {place: path for path, place in _paths(tree, "RESULT")}
    return tuple(
        Slot(names=tuple(filter(None, (aliases.get(place), f"OUTPUT__{place}", paths.get(place)))))
        for place in range(spec.num_leaves)
    )


def _paths(tree: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(tree, int):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, below in tree.items():
            yield from _paths(below, f"{prefix}[{key}]")
    elif isinstance(tree, list | tuple):
        for index, below in enumerate(tree):
            yield from _paths(below, f"{prefix}[{index}]")
