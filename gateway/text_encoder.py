"""Models without OpenAI's contract that can embed texts.

Such a model has exactly one required input, BYTES with one element, and exactly one output that
is a vector of FP32 of a fixed size. Optional inputs are not sent. Other outputs are not requested,
except `num_input_tokens`, the number of tokens of the text.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.policy.caller import Caller
from gateway.tensor import Datatype, Tensor

TOKENS = "num_input_tokens"
INTEGERS = frozenset(each for each in Datatype if each.lstrip("U").startswith("INT"))

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """The tensors by which a model embeds one text; `size` is the length of an embedding."""

    model: str
    input: str
    shape: tuple[int, ...]
    output: str
    size: int
    counts_tokens: bool

    def request(
        self,
        text: str,
        request_id: str,
        received_ns: int,
        caller: Caller | None = None,
        version: str = "",
    ) -> InferRequest:
        """The request for one text."""
        names = (self.output, TOKENS) if self.counts_tokens else (self.output,)
        return InferRequest(
            model=self.model,
            version=version,
            id=request_id,
            inputs=(Tensor(self.input, Datatype.BYTES, self.shape, (text.encode(),)),),
            outputs=tuple([RequestedOutput(name) for name in names]),
            received_ns=received_ns,
            caller=caller,
        )

    def vector(self, response: InferResponse) -> Vector:
        """The embedding; INTERNAL if it is missing, of another size, or has NaN or infinities."""
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
        """The number of tokens of the text; 0 if the model has no such output."""
        output = response.output(TOKENS) if self.counts_tokens else None
        return 0 if output is None else int(output.array().sum())


def encoder_of(config: ModelConfig) -> TextEncoder | None:
    """The encoder of a model with this config; None if it cannot embed texts."""
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
        counts_tokens=any(e.name == TOKENS and e.datatype in INTEGERS for e in config.output),
    )


def _is_text(tensor: ModelInput) -> bool:
    return tensor.datatype is Datatype.BYTES and all(dim in (1, -1) for dim in tensor.dims)


def _is_vector(tensor: ModelOutput) -> bool:
    dims = tensor.dims
    return tensor.datatype is Datatype.FP32 and bool(dims) and 0 < dims[-1] == math.prod(dims)
