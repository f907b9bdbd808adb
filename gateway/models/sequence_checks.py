"""Checks of a sequence batcher's configuration, with Triton's texts."""

from collections.abc import Iterator

from gateway.batches.stacking import sequence_inputs
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import (
    Control,
    ControlKind,
    InitialState,
    SequenceBatching,
    State,
    StrategyOldest,
)

ID_TYPES = (
    DataType.TYPE_UINT64,
    DataType.TYPE_INT64,
    DataType.TYPE_UINT32,
    DataType.TYPE_INT32,
    DataType.TYPE_STRING,
)
FORMS = "'int32_false_true', 'fp32_false_true'"


def sequence_problems(config: ModelConfig, batching: SequenceBatching) -> Iterator[str]:
    """Problems of strategy, controls and states; files of states are not read."""
    name = config.name
    if batching.oldest is not None:
        yield from _oldest_problems(config, batching.oldest)
    if batching.direct is not None and not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
    yield from _control_problems(config, batching)
    yield from _state_problems(config, batching)
    yield from _name_problems(config, batching)


def _oldest_problems(config: ModelConfig, oldest: StrategyOldest) -> Iterator[str]:
    for size in oldest.preferred_batch_size:
        if size <= 0:
            yield f"sequence batching preferred batch size must be positive for {config.name}"
        if size > config.max_batch_size:
            yield (
                "sequence batching preferred batch size must be <= max batch size for "
                f"{config.name}"
            )


# Controls.


def _control_problems(config: ModelConfig, batching: SequenceBatching) -> Iterator[str]:
    model = config.name
    tensors: set[str] = set()
    kinds: set[ControlKind] = set()
    for tensor in batching.control_input:
        if not tensor.name:
            yield f"sequence batching control tensor must have a name for {model}"
        if tensor.name in tensors or len({each.kind for each in tensor.control}) > 1:
            yield (
                f"sequence batching control tensor '{tensor.name}' is specified for multiple "
                f"control kinds for {model}"
            )
        if not tensor.control:
            yield (
                f"sequence batching control tensor '{tensor.name}' must specify 'control' for "
                f"{model}"
            )
        tensors.add(tensor.name)
        for control in tensor.control:
            if control.kind in kinds:
                yield f"sequence batching specifies multiple {control.kind} tensors for {model}"
            kinds.add(control.kind)
            yield from _encoding_problems(model, control)


def _encoding_problems(model: str, control: Control) -> Iterator[str]:
    forms = {
        "int32_false_true": control.int32_false_true,
        "fp32_false_true": control.fp32_false_true,
        "bool_false_true": control.bool_false_true,
    }
    given = {form: values for form, values in forms.items() if values}
    about = f"'bool_false_true' for {control.kind} for {model}"
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        if given:
            yield f"sequence batching must not specify either {FORMS} or {about}"
        if control.data_type not in ID_TYPES:
            yield (
                f"unexpected data type for control {control.kind} for {model}. Allowed data types "
                "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        yield f"sequence batching must specify either {FORMS} or {about}"
    if len(given) > 1:
        yield f"sequence batching specifies more than one from {FORMS} and {about}"
    for form, values in given.items():
        if len(values) != 2:
            yield (
                f"sequence batching control '{form}' must have exactly 2 entries for "
                f"{control.kind} for {model}"
            )


# States.


def _state_problems(config: ModelConfig, batching: SequenceBatching) -> Iterator[str]:
    inputs: set[str] = set()
    outputs: set[str] = set()
    for state in batching.state:
        yield from _form_problems(config, state)
        if state.input_name in inputs:
            yield f"State input name '{state.input_name}' specified more than once."
        if state.output_name in outputs:
            yield f"State output name '{state.output_name}' specified more than once."
        inputs.add(state.input_name)
        outputs.add(state.output_name)
        if (count := len(state.initial_state)) > 1:
            yield (
                f"initial_state field for state input '{state.input_name}' must contain exactly "
                f"one or zero element. Found '{count}' elements."
            )
        for given in state.initial_state:
            yield from _initial_problems(state, given)


def _form_problems(config: ModelConfig, state: State) -> Iterator[str]:
    if not state.input_name or not state.output_name:
        yield (
            f"sequence batching state must specify 'input_name' and 'output_name' for {config.name}"
        )
    if state.data_type is DataType.TYPE_INVALID:
        yield (
            f"sequence batching state '{state.input_name}' must specify 'data_type' for "
            f"{config.name}"
        )
    if not all(dim >= 1 or dim == -1 for dim in state.dims):
        yield (
            f"sequence batching state '{state.input_name}' dimension must be integer >= 1, or -1 "
            f"to indicate a variable-size dimension for {config.name}"
        )
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield (
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state "
            f"input name '{state.input_name}'."
        )


def _initial_problems(state: State, given: InitialState) -> Iterator[str]:
    name = state.input_name
    if given.data_type is not state.data_type:
        yield (
            f"The data type used for 'initial_state' field of state '{name}' does not match the "
            "state data type."
        )
    if not given.name:
        yield f"Field 'name' must be set when using initial_state for state input '{name}'."
    if len(given.dims) != len(state.dims):
        yield (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            f"for state input '{name}'. {len(given.dims)} != {len(state.dims)}"
        )
    for found, expected in zip(given.dims, state.dims, strict=False):
        if found == -1:
            yield (
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        elif found < 1 or expected not in (-1, found):
            yield (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim "
                f"description. {found} != {expected}"
            )
    if given.zero_data is None and given.data_file is None:
        yield f"initial_state setting expects state'{name}' to have state_data set"


# Names.


def _name_problems(config: ModelConfig, batching: SequenceBatching) -> Iterator[str]:
    """Clients must not send tensors that the server adds."""
    known = {each.name for each in config.input}
    added: set[str] = set()
    for tensor in sequence_inputs(batching):
        if tensor.name in known or tensor.name in added:
            yield (
                f"sequence batching tensor '{tensor.name}' of model '{config.name}' is added by "
                "the server, expected no other input of that name"
            )
        added.add(tensor.name)
