"""One instance of a model in a session of TensorFlow."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.tensorflow.library import clear_failures, tf
from backends.tensorflow.session import SharedSession
from gateway.backend import ModelContext
from gateway.batches.shapes import ANY_SIZE, agree, as_model_sees
from gateway.batches.stacking import with_sequence_tensors
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, Tensor, array_tensor, format_shape
from gateway.tensor_runtime.instance import TensorInstance
from gateway.tensor_runtime.signature import (
    ModelSignature,
    ModelTensor,
    input_names,
    output_names,
)

BFLOAT16: Any = tf.bfloat16.as_numpy_dtype


class TensorFlowInstance(TensorInstance):
    """Inputs are views of the requests, outputs are views of the library's memory.

    The library cannot end a run early: it stops loops only, and closes the session with them.
    """

    def __init__(
        self, context: ModelContext, session: SharedSession, signature: ModelSignature
    ) -> None:
        config = context.config
        self._model = config.name
        self._session: SharedSession | None = session
        self._running = clear_failures(context.path, f"model '{config.name}' failed")
        self._datatypes = {
            each.name: each.datatype for each in with_sequence_tensors(config).output
        }
        self._fixed = _fixed_dims(config, signature)
        self._scalar_inputs = _scalars(config, signature.inputs)
        self._scalar_outputs = _scalars(config, signature.outputs)
        with clear_failures(context.path, f"unable to load model '{config.name}'"):
            session.call(input_names(config), output_names(config))
        super().__init__(config, context.name)  # starts a thread: must be last

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        assert self._session is not None, "runs end before the release"  # noqa: S101
        for name, dims in self._fixed.items():
            if name in inputs and not agree(dims, inputs[name].shape):
                raise self._unexpected(inputs[name], dims)
        arrays = [self._array(each) for each in inputs.values()]
        with self._running:
            found = self._session.call(tuple(inputs), tuple(outputs))(*arrays)
        return {
            name: self._output(name, each, arrays)
            for name, each in zip(outputs, found, strict=True)
        }

    def release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.leave()

    def _unexpected(self, tensor: Tensor, dims: tuple[int, ...]) -> InferenceError:
        return InferenceError(
            Code.INVALID_ARG,
            f"unexpected shape for input '{tensor.name}' of model '{self._model}': found "
            f"{format_shape(tensor.shape)}, the model takes {format_shape(dims)}",
        )

    def _array(self, tensor: Tensor) -> npt.NDArray[Any]:
        array = tensor.array()
        if tensor.name in self._scalar_inputs and array.size == 1:
            array = array.reshape(())
        return array.view(BFLOAT16) if tensor.datatype is Datatype.BF16 else array

    def _output(self, name: str, found: Any, inputs: Iterable[npt.NDArray[Any]]) -> Tensor:
        datatype = self._datatypes[name]
        array = np.asarray(found, dtype=np.object_ if datatype is Datatype.BYTES else None)
        if not array.shape and name in self._scalar_outputs:
            array = array.reshape(1)
        if datatype is Datatype.BYTES:
            return array_tensor(name, datatype, array)
        # An operation may answer with the memory of its input, which clients may write to.
        if any(np.may_share_memory(array, each) for each in inputs):
            array = array.copy()
        return array_tensor(
            name, datatype, array.view(np.uint16) if datatype is Datatype.BF16 else array
        )


def _fixed_dims(config: ModelConfig, signature: ModelSignature) -> dict[str, tuple[int, ...]]:
    """The model's dims of inputs whose config allows more: the library does not check them."""
    found = {}
    for each in as_model_sees(config).input:
        whole = (ANY_SIZE, *each.dims) if config.batching else each.dims
        dims = signature.inputs[each.name].dims
        if dims and not each.allow_ragged_batch and dims != whole and ANY_SIZE in whole:
            found[each.name] = dims
    return found


def _scalars(config: ModelConfig, tensors: Mapping[str, ModelTensor]) -> frozenset[str]:
    """The model's scalars, which a config without batches can only list as one element."""
    if config.batching:
        return frozenset()
    return frozenset(name for name, each in tensors.items() if each.dims == ())
