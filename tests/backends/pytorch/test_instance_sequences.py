"""Controls and states are arguments and results like others."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, SequenceBatching, State
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, array_tensor
from tests import torch_models as models
from tests.backends.pytorch.conftest import Load

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FP32 = DataType.TYPE_FP32
START = Control(kind=ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0.0, 1.0))
ADDING = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(ModelInput(name="x", data_type=FP32, dims=(1,)),),
    output=(ModelOutput(name="y__0", data_type=FP32, dims=(1,)),),
    sequence_batching=SequenceBatching(
        control_input=(ControlInput(name="start", control=(START,)),),
        state=(State(input_name="kept", output_name="kept__1", data_type=FP32, dims=(1,)),),
    ),
)


class Adding(torch.nn.Module):
    """Adds up since the start."""

    def forward(
        self, x: torch.Tensor, start: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + kept * (1 - start)
        return total, total + 0


def row(x: float, start: float, kept: float) -> InferRequest:
    values = {"x": x, "start": start, "kept": kept}
    return InferRequest(
        model="m",
        inputs=tuple(
            array_tensor(name, Datatype.FP32, np.array([[value]], "<f4"))
            for name, value in values.items()
        ),
    )


async def test_rows_of_different_sequences_execute_together(load: Load, tmp_path: Path) -> None:
    models.script(Adding(), tmp_path / "model.pt")
    instance = await load(ADDING, tmp_path)
    rows: Sequence[InferRequest] = [row(1, 1, 50), row(2, 0, 40), row(3, 0, 0)]
    found = [answer async for answer in instance.execute(rows)]
    answers = [response for _, response in found if isinstance(response, InferResponse)]
    shown = [{each.name: each.array().item() for each in one.outputs} for one in answers]
    assert shown == [
        {"y__0": 1.0, "kept__1": 1.0},
        {"y__0": 42.0, "kept__1": 42.0},
        {"y__0": 3.0, "kept__1": 3.0},
    ]
