"""Which tensors does a sequence batcher add to those of its model, as the runtime sees them?

Control inputs and states (`ModelSequenceBatching` of the model configuration) are tensors of the
model like others, but no client sees them.
"""

from dataclasses import replace

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlKind, SequenceBatching, State


def with_sequence_tensors(config: ModelConfig) -> ModelConfig:
    """The config with controls and states among its inputs and outputs; itself if it has none."""
    batching = config.sequence_batching
    if batching is None:
        return config
    known = {each.name for each in config.output}
    states = [each for each in batching.state if each.output_name not in known]
    return replace(
        config,
        input=(*config.input, *sequence_inputs(batching)),
        output=(*config.output, *(_output(each) for each in states)),
    )


def sequence_inputs(batching: SequenceBatching) -> tuple[ModelInput, ...]:
    """What the batcher adds to the inputs of each request: controls first, then states."""
    controls = (
        ModelInput(name=each.name, data_type=control_type(control), dims=(1,))
        for each in batching.control_input
        for control in each.control[:1]
    )
    return (*controls, *(_input(each) for each in batching.state))


def control_type(control: Control) -> DataType:
    """The data type of a control's tensor."""
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.TYPE_INT32
    return DataType.TYPE_FP32 if control.fp32_false_true else DataType.TYPE_BOOL


def _input(state: State) -> ModelInput:
    return ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _output(state: State) -> ModelOutput:
    return ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
