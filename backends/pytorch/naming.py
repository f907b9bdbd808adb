"""Which argument or result of a program does a name in the configuration mean?

Triton's rules, the first that holds for all names: they are names of arguments, they end in
`__<index>`, or else they stand in the order of the arguments.
"""

import re
from collections.abc import Iterator, Sequence

from backends.pytorch.signature import Slot
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

_INDEXED = re.compile(r".*?__(\d+)")
"""The first `__` counts, as in Triton."""


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """Everything that the model is fed: its inputs and what the server derives or adds."""
    return (
        *(each.name for each in config.input),
        *(name for each in config.batch_input for name in each.target_name),
        *_sequence_inputs(config),
    )


def output_names(config: ModelConfig) -> tuple[str, ...]:
    """Everything that the model gives: its outputs, and the states that are none of them."""
    names = [each.name for each in config.output]
    states = config.sequence_batching.state if config.sequence_batching else ()
    return (*names, *(each.output_name for each in states if each.output_name not in names))


def _sequence_inputs(config: ModelConfig) -> Iterator[str]:
    if config.sequence_batching is not None:
        yield from (each.name for each in config.sequence_batching.control_input)
        yield from (each.input_name for each in config.sequence_batching.state)


def places(names: Sequence[str], slots: Sequence[Slot] | None) -> tuple[int, ...]:
    """The place of each name; it may lie behind the last slot, which is for the caller to say."""
    known = {name: place for place, slot in enumerate(slots or ()) for name in slot.names}
    if all(name in known for name in names):
        return tuple(known[name] for name in names)
    indexed = [_INDEXED.fullmatch(name) for name in names]
    if all(indexed):
        return tuple(int(match[1]) for match in indexed if match)
    return tuple(range(len(names)))


def place_inputs(config: ModelConfig, slots: Sequence[Slot]) -> dict[str, int]:
    """Where each input goes; INVALID_ARG if they are not the ones the program takes."""
    names = input_names(config)
    required = sum(not slot.optional for slot in slots)
    if not required <= len(names) <= len(slots):
        raise InferenceError(
            Code.INVALID_ARG,
            f"unable to load model '{config.name}', configuration expects {len(names)} inputs, "
            f"model provides {len(slots)}",
        )
    found = dict(zip(names, places(names, slots), strict=True))
    _check_places(config, "input", found, len(slots))
    for place, slot in enumerate(slots):
        if not slot.optional and place not in found.values():
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to load model '{config.name}', no input of the configuration is for "
                f"argument {place} ('{slot.names[0]}'), found {', '.join(names)}",
            )
    return found


def place_outputs(config: ModelConfig, slots: Sequence[Slot] | None) -> dict[str, int]:
    """Where each output comes from; INVALID_ARG if the program is known not to have it."""
    names = output_names(config)
    found = dict(zip(names, places(names, slots), strict=True))
    if slots is not None:
        for name, place in found.items():
            check_place(name, place, len(slots))
    return found


def check_place(output: str, place: int, count: int) -> None:
    """Raise INVALID_ARG if the program has fewer outputs."""
    if place >= count:
        raise InferenceError(
            Code.INVALID_ARG,
            f"The output {output} in the model configuration refers to an output index which "
            f"doesn't exist. This model has {count} outputs",
        )


def _check_places(config: ModelConfig, role: str, found: dict[str, int], count: int) -> None:
    taken: dict[int, str] = {}
    for name, place in found.items():
        if place >= count:
            problem = f"refers to argument {place}, expected one of 0 to {count - 1}"
        elif place in taken:
            problem = f"refers to argument {place} as {role} '{taken[place]}' does"
        else:
            taken[place] = name
            continue
        raise InferenceError(
            Code.INVALID_ARG, f"unable to load model '{config.name}', {role} '{name}' {problem}"
        )
