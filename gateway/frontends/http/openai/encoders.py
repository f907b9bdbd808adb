"""Can a model that knows nothing of OpenAI embed texts? One whose tensors leave only one reading.

It has exactly one required input, BYTES with one element, and exactly one output that is a vector
of FP32 of a fixed size. Whatever else it has is neither given nor asked for, but for the output
`num_input_tokens`, which tells how many tokens a text was.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.tensor import Datatype, Tensor

TOKENS = "num_input_tokens"
INTEGERS = frozenset(each for each in Datatype if each.lstrip("U").startswith("INT"))

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """How a model embeds one text; `size` is how many numbers make an embedding."""

    model: str
    input: str
    shape: tuple[int, ...]
    output: str
    size: int
    tells_tokens: bool

    def request(self, text: str, request_id: str, received_ns: int) -> InferRequest:
        """The request for one text."""
        names = (self.output, TOKENS) if self.tells_tokens else (self.output,)
        return InferRequest(
            model=self.model,
            id=request_id,
            inputs=(Tensor(self.input, Datatype.BYTES, self.shape, (text.encode(),)),),
            outputs=tuple([RequestedOutput(name) for name in names]),
            received_ns=received_ns,
        )

    def vector(self, response: InferResponse) -> Vector:
        """The embedding; INTERNAL if there is none, or numbers in it are none."""
        output = response.output(self.output)
        found = None if output is None else output.array().reshape(-1)
        if found is None or found.size != self.size or not np.isfinite(found).all():
            raise InferenceError(
                Code.INTERNAL,
                f"model '{self.model}' did not answer with {self.size} finite numbers in "
                f"'{self.output}'",
            )
        return found

    def tokens(self, response: InferResponse) -> int:
        """How many tokens the text was; 0 if the model does not tell."""
        output = response.output(TOKENS) if self.tells_tokens else None
        return 0 if output is None else int(output.array().sum())


def encoder_of(config: ModelConfig) -> TextEncoder | None:
    """How a model of this config embeds a text; None if it does not."""
    required = [each for each in config.input if not each.optional]
    vectors = [each for each in config.output if _is_vector(each)]
    if len(required) != 1 or len(vectors) != 1 or not _is_text(required[0]):
        return None
    return TextEncoder(
        model=config.name,
        input=required[0].name,
        shape=(1,) * len(config.wire_shape(required[0])),
        output=vectors[0].name,
        size=vectors[0].dims[-1],
        tells_tokens=any(e.name == TOKENS and e.datatype in INTEGERS for e in config.output),
    )


def _is_text(tensor: ModelInput) -> bool:
    return tensor.datatype is Datatype.BYTES and all(dim in (1, -1) for dim in tensor.dims)


def _is_vector(tensor: ModelOutput) -> bool:
    dims = tensor.dims
    return tensor.datatype is Datatype.FP32 and bool(dims) and 0 < dims[-1] == math.prod(dims)
