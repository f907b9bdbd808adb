"""A draft reads as if written by hand, and states only facts of the file."""

from gateway.backend import Description
from gateway.config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    TensorReshape,
    TransactionPolicy,
)
from gateway.config.data_type import DataType
from gateway.config.pbtxt import parse
from gateway.tools.draft import draft_text

FP32 = DataType.TYPE_FP32

WHOLE = """\
# Drafted from 1/net.onnx by `sluice config`.

backend: "onnxruntime"
platform: "onnxruntime_onnx"
default_model_filename: "net.onnx"

# 0: requests are not batched, and dims below are whole shapes. If the first dimension of every
# tensor is a batch, write its largest size here and leave that dimension out of dims.
max_batch_size: 0

# -1 in dims is a dimension of any size.
input [
  {
    name: "a \\"b\\""
    data_type: TYPE_FP32
    dims: [ -1, 3 ]  # as traced
    optional: true
  },
  {
    name: "c"
    # dims are secret: fill in both, such as
    # data_type: TYPE_FP32
    # dims: [ -1 ]
  }
]

output [
  {
    name: "y"
    data_type: TYPE_STRING
    dims: [ 1 ]
    reshape { shape: [ ] }
  }
]

# Copies of the model that work side by side: more of them fill a device that one leaves idle.
# KIND_AUTO is a GPU where there is one, else the CPU; KIND_GPU and KIND_CPU insist.
instance_group [
  {
    count: 1
    kind: KIND_AUTO
  }
]
"""


def test_the_text_of_a_draft() -> None:
    config = ModelConfig(
        backend="onnxruntime",
        platform="onnxruntime_onnx",
        input=(
            ModelInput(name='a "b"', data_type=FP32, dims=(-1, 3), optional=True),
            ModelInput(name="c"),
        ),
        output=(
            ModelOutput(
                name="y", data_type=DataType.TYPE_STRING, dims=(1,), reshape=TensorReshape()
            ),
        ),
    )
    notes = {'a "b"': "as traced", "c": "dims are secret"}
    text = draft_text(Description(config, notes), "1/net.onnx", "net.onnx")
    assert text == WHOLE
    assert parse(text, "x").input[0] == config.input[0]


def test_a_decoupled_model_stays_one() -> None:
    config = ModelConfig(
        backend="python", model_transaction_policy=TransactionPolicy(decoupled=True)
    )
    assert parse(draft_text(Description(config), "1/model.py", ""), "x").decoupled
