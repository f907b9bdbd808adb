"""Checks of sequence batchers; the texts are Triton's, `m` is the model."""

import pytest

from gateway.config import pbtxt
from gateway.models.sequence_checks import sequence_problems

INPUT = 'input { name: "x" data_type: TYPE_INT32 dims: [1] }'
STATE = 'input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [2, -1]'
BOTH = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
FORMS = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"


def problem(batching: str) -> str:
    text = f'name: "m" max_batch_size: 4 {INPUT} sequence_batching {{ {batching} }}'
    config = pbtxt.parse(text, "m/config.pbtxt")
    assert config.sequence_batching is not None
    return next(sequence_problems(config, config.sequence_batching), "")


def control(text: str, name: str = "c") -> str:
    return f'control_input {{ name: "{name}" control {{ {text} }} }}'


def start(form: str, name: str = "c") -> str:
    return control(f"kind: CONTROL_SEQUENCE_START {form}", name)


def initial(text: str, name: str = 'name: "i"') -> str:
    return f"state {{ {STATE} initial_state {{ {name} {text} }} }}"


@pytest.mark.parametrize(
    "batching",
    [
        "",
        "direct { minimum_slot_utilization: 1 max_queue_delay_microseconds: 5 }",
        "oldest { preferred_batch_size: [1, 4] }",
        start("bool_false_true: [false, true]"),
        start("int32_false_true: [0, 1]")
        + control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING", "d"),
        f"state {{ {STATE} }}",
        initial("data_type: TYPE_INT32 dims: [2, 7] zero_data: true"),
        initial('data_type: TYPE_INT32 dims: [2, 7] data_file: "f"'),
        f"state {{ {STATE} use_same_buffer_for_input_output: true use_growable_memory: true }}",
    ],
)
def test_what_can_be_is_accepted(batching: str) -> None:
    assert problem(batching) == ""


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        (
            "oldest { preferred_batch_size: [0] }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: [5] }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "direct { minimum_slot_utilization: 1.01 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            "direct { minimum_slot_utilization: -0.1 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(batching: str, message: str) -> None:
    assert problem(batching) == message


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        (
            start("int32_false_true: [0, 1]", name=""),
            "sequence batching control tensor must have a name for m",
        ),
        (
            start("int32_false_true: [0, 1]") * 2,
            "sequence batching control tensor 'c' is specified for multiple control kinds for m",
        ),
        (
            'control_input { name: "c" control [ '
            "{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }, "
            "{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } ] }",
            "sequence batching control tensor 'c' is specified for multiple control kinds for m",
        ),
        (
            'control_input { name: "c" }',
            "sequence batching control tensor 'c' must specify 'control' for m",
        ),
        (
            start("int32_false_true: [0, 1]") + start("int32_false_true: [0, 1]", "d"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (start(""), f"sequence batching must specify {BOTH} for CONTROL_SEQUENCE_START for m"),
        (
            start("int32_false_true: [0, 1] fp32_false_true: [0, 1]"),
            f"sequence batching specifies more than one from {FORMS} for "
            "CONTROL_SEQUENCE_START for m",
        ),
        (
            start("int32_false_true: [0, 1, 2]"),
            "sequence batching control 'int32_false_true' must have exactly 2 entries for "
            "CONTROL_SEQUENCE_START for m",
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID int32_false_true: [0, 1]"),
            f"sequence batching must not specify {BOTH} for CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types "
            "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (
            start("int32_false_true: [0, 1]", name="x"),
            "sequence batching tensor 'x' of model 'm' is added by the server, expected no other "
            "input of that name",
        ),
    ],
)
def test_controls_that_cannot_be_are_refused(batching: str, message: str) -> None:
    assert problem(batching) == message


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        (
            f"state {{ {STATE} }} state {{ {STATE} }}",
            "State input name 's' specified more than once.",
        ),
        (
            "state { " + STATE + " } state { " + STATE.replace('"s"', '"r"') + " }",
            "State output name 't' specified more than once.",
        ),
        (
            "state { data_type: TYPE_INT32 dims: [1] }",
            "sequence batching state must specify 'input_name' and 'output_name' for m",
        ),
        (
            'state { input_name: "s" output_name: "t" dims: [1] }',
            "sequence batching state 's' must specify 'data_type' for m",
        ),
        (
            'state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [0] }',
            "sequence batching state 's' dimension must be integer >= 1, or -1 to indicate a "
            "variable-size dimension for m",
        ),
        (
            f"state {{ {STATE} use_growable_memory: true }}",
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state "
            "input name 's'.",
        ),
        (
            f"state {{ {STATE} initial_state {{ }} initial_state {{ }} }}",
            "initial_state field for state input 's' must contain exactly one or zero element. "
            "Found '2' elements.",
        ),
        (
            initial("data_type: TYPE_INT64 dims: [2, 7] zero_data: true"),
            "The data type used for 'initial_state' field of state 's' does not match the state "
            "data type.",
        ),
        (
            initial("data_type: TYPE_INT32 dims: [2, 7] zero_data: true", name=""),
            "Field 'name' must be set when using initial_state for state input 's'.",
        ),
        (
            initial("data_type: TYPE_INT32 dims: [2] zero_data: true"),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            "for state input 's'. 1 != 2",
        ),
        (
            initial("data_type: TYPE_INT32 dims: [3, 7] zero_data: true"),
            "'initial_state' dim for input name 's' doesn't match 'state' dim description. 3 != 2",
        ),
        (
            initial("data_type: TYPE_INT32 dims: [2, -1] zero_data: true"),
            "'initial_state' field for state input name 's' contains variable dimensions.",
        ),
        (
            initial("data_type: TYPE_INT32 dims: [2, 7]"),
            "initial_state setting expects state's' to have state_data set",
        ),
    ],
)
def test_states_that_cannot_be_are_refused(batching: str, message: str) -> None:
    assert problem(batching) == message
