"""One infer request of a compiled model."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.openvino.library import openvino
from backends.openvino.model_file import bounded_shapes, clear_failures, fits_bounds, named
from gateway.backend import ModelContext
from gateway.batches.stacking import with_sequence_tensors
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, Tensor, array_tensor, format_shape, unicode_strings
from gateway.tensor_runtime.instance import TensorInstance
from gateway.tensor_runtime.signature import input_names, output_names


class Compiled:
    """A compiled model; `rows` is its only batch size, or 0."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.rows = rows


class OpenVinoInstance(TensorInstance):
    """Outputs are copied, since the next run overwrites them; so are inputs of one request.

    Batches of a model that fixes its batch size are padded with zeros, or divided.
    """

    def __init__(self, context: ModelContext, compiled: Compiled) -> None:
        config = context.config
        self._model = config.name
        self._compiled: Compiled | None = compiled
        self._fixed_rows = compiled.rows
        what = f"model '{config.name}' failed"
        self._running = clear_failures(context.path, what, "running inference - wait")
        self._setting = clear_failures(context.path, what, "setting tensor data")
        with clear_failures(context.path, what, "creating infer request object"):
            self._request: Any = compiled.model.create_infer_request()
        self._inputs = _places(compiled.model.inputs, input_names(config))
        self._outputs = _places(compiled.model.outputs, output_names(config))
        self._latest_shapes: Sequence[tuple[int, ...]] = ()
        self._may_cancel = False
        self._bounded = bounded_shapes(compiled.model, input_names(config))
        outputs = with_sequence_tensors(config).output
        self._datatypes = {each.name: each.datatype for each in outputs}
        super().__init__(context.config, context.name)  # starts a thread: must be last

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        arrays = {name: self._array(each) for name, each in inputs.items()}
        for name in self._bounded.keys() & arrays.keys():
            self._check_bounds(name, arrays[name].shape)
        found = (
            self._run_in_parts(arrays, outputs) if self._fixed_rows else self._run(arrays, outputs)
        )
        return {
            name: array_tensor(name, self._datatypes[name], array) for name, array in found.items()
        }

    def _check_bounds(self, name: str, shape: Sequence[int]) -> None:
        if not fits_bounds(shape, self._bounded[name]):
            raise InferenceError(
                Code.INVALID_ARG,
                f"unexpected shape for input '{name}' of model '{self._model}': found "
                f"{format_shape(shape)}, the model takes {self._bounded[name]}",
            )

    def abort(self) -> None:
        """Cancel the run between two operations, if its inputs have the shapes of the run before.

        After a cancelled run with other shapes OpenVINO may give the next run its shapes, with
        memory that was never written.
        """
        if self._request is not None and self._may_cancel:
            self._request.cancel()

    def release(self) -> None:
        self._request = self._compiled = None

    def _run(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
    ) -> dict[str, npt.NDArray[Any]]:
        with self._setting:
            # The tensors must stay until the end of the run.
            tensors = {name: self._tensor(name, array) for name, array in inputs.items()}
            for name, tensor in tensors.items():
                self._request.set_input_tensor(self._inputs[name][0], tensor)
        shapes = [array.shape for array in inputs.values()]
        self._may_cancel = shapes == self._latest_shapes
        with self._running:
            self._request.infer()
            self._latest_shapes = shapes
            return {name: self._output(name) for name in outputs}

    def _run_in_parts(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
    ) -> dict[str, npt.NDArray[Any]]:
        """Run as many rows at once as the model takes; none are one padded run."""
        rows, whole = self._fixed_rows, len(next(iter(inputs.values())))
        parts = [
            self._run(
                {name: _padded(each[at : at + rows], rows) for name, each in inputs.items()},
                outputs,
            )
            for at in range(0, max(1, whole), rows)
        ]
        return {name: np.concatenate([part[name] for part in parts])[:whole] for name in outputs}

    def _array(self, tensor: Tensor) -> npt.NDArray[Any]:
        if tensor.datatype is Datatype.BYTES:
            return self._strings(tensor)
        return tensor.array()

    def _strings(self, tensor: Tensor) -> npt.NDArray[Any]:
        strings = unicode_strings(tensor, self._model, "OpenVINO models")
        if any(each.endswith("\0") for each in strings.flat):
            raise InferenceError(
                Code.INVALID_ARG,
                f"input '{tensor.name}' of model '{self._model}' has an element that ends with a "
                "zero byte, which OpenVINO would drop",
            )
        return strings

    def _tensor(self, name: str, array: npt.NDArray[Any]) -> Any:
        kind = self._inputs[name][1]
        if kind == openvino.Type.bf16:
            return openvino.Tensor(array, openvino.Shape(array.shape), kind)
        if kind == openvino.Type.string:
            tensor = openvino.Tensor(kind, openvino.Shape(array.shape))
            if array.size:
                tensor.str_data = array.astype(np.str_)
            return tensor
        # The library takes no memory that it may not write, such as that of a request.
        usable = array.flags.writeable and array.flags.aligned and array.flags.c_contiguous
        return openvino.Tensor(array, shared_memory=usable)

    def _output(self, name: str) -> npt.NDArray[Any]:
        place, kind = self._outputs[name]
        tensor = self._request.get_output_tensor(place)
        if kind == openvino.Type.string:
            return np.array(tensor.str_data, dtype=np.object_)
        data: npt.NDArray[Any] = tensor.data
        return data.view(np.uint16).copy() if kind == openvino.Type.bf16 else data.copy()


def _places(ports: Sequence[Any], known: Collection[str]) -> dict[str, tuple[int, Any]]:
    """The place and the element type of each port, by name."""
    return {
        name: (place, port.get_element_type())
        for place, (name, port) in enumerate(named(ports, known))
    }


def _padded(part: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    missing = rows - len(part)
    if not missing:
        return part
    fill = np.zeros((missing, *part.shape[1:]), part.dtype)
    if part.dtype == np.object_:
        fill[...] = ""
    return np.concatenate([part, fill])
