"""The file of a model, read and fitted to its config; its inputs and outputs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.openvino.library import PrePostProcessor, openvino
from backends.openvino.whole_files import check_whole
from gateway.batches.shapes import ANY_SIZE
from gateway.batches.stacking import with_sequence_tensors
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape
from gateway.tensor_runtime.failures import ClearFailures
from gateway.tensor_runtime.model_files import file_below
from gateway.tensor_runtime.signature import (
    ModelSignature,
    ModelTensor,
    input_names,
    output_names,
)

DEFAULT_FILE = "model.xml"

DATA_TYPES = {
    "boolean": DataType.TYPE_BOOL,
    "u8": DataType.TYPE_UINT8,
    "u16": DataType.TYPE_UINT16,
    "u32": DataType.TYPE_UINT32,
    "u64": DataType.TYPE_UINT64,
    "i8": DataType.TYPE_INT8,
    "i16": DataType.TYPE_INT16,
    "i32": DataType.TYPE_INT32,
    "i64": DataType.TYPE_INT64,
    "f16": DataType.TYPE_FP16,
    "f32": DataType.TYPE_FP32,
    "f64": DataType.TYPE_FP64,
    "bf16": DataType.TYPE_BF16,
    "string": DataType.TYPE_STRING,
}
"""By the library's names of element types; without narrow numbers, such as u4."""
ELEMENT_TYPES = {data_type: kind for kind, data_type in DATA_TYPES.items()}

UNBOUNDED = (0, -1)
"""The bounds of a dim of any size."""

ERRORS = (RuntimeError, ValueError, TypeError, MemoryError, OSError)
"""The library raises RuntimeError, its bindings also Python's own."""
PLACES = re.compile(r"Exception from \S+:\d+:|Check '.*?' failed at \S+:\d+:", re.DOTALL)
"""Places in the library's sources, which begin its texts."""


def clear_failures(folder: Path, what: str, where: str) -> ClearFailures:
    """A context for calls of the library; `where` is Triton's name of the call."""
    return ClearFailures(
        folder, what, ERRORS, lambda text: f"openvino error in {where} : {PLACES.sub('', text)}"
    )


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The model's file, or its folder for a SavedModel.

    Raises InferenceError UNAVAILABLE, as Triton, if it is missing, and INVALID_ARG for a name
    outside of the version folder.
    """
    file = file_below(folder, folder, config.default_model_filename or DEFAULT_FILE, config)
    if not file.exists():
        shown = Path(folder.name, file.relative_to(folder))
        raise InferenceError(
            Code.UNAVAILABLE, f"unable to find '{shown}' for model '{config.name}'"
        )
    return file


def read_model(core: Any, config: ModelConfig, folder: Path) -> Any:
    """The model in the file, without compilation; InferenceError if it cannot be read."""
    file = find_model(config, folder)
    check_whole(config, file)
    with clear_failures(folder, f"unable to load model '{config.name}'", "reading model"):
        return core.read_model(str(file))


def signature(model: Any, config: ModelConfig) -> ModelSignature:
    """The inputs and outputs of a model; of several names of one, that of the config."""
    inputs = named(model.inputs, input_names(config))
    outputs = named(model.outputs, output_names(config))
    return ModelSignature(
        {name: _tensor(name, port) for name, port in inputs},
        {name: _tensor(name, port) for name, port in outputs},
    )


def named(ports: Iterable[Any], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The name of each port: one of `known`, or else the library's first.

    An output without a name has that of its operation, too.
    """
    for port in ports:
        names = sorted(port.get_names())
        operation = _operation(port)
        wanted = [name for name in (*names, operation) if name in known]
        yield next(iter([*wanted, *names]), operation), port


def _operation(port: Any) -> str:
    """The name of the operation that computes an output without a name, or of an input."""
    node = port.get_node()
    if node.get_type_name() == "Result":
        node = node.inputs()[0].get_source_output().get_node()
    return str(node.get_friendly_name())


def _tensor(name: str, port: Any) -> ModelTensor:
    kind = str(port.get_element_type().get_type_name())
    return ModelTensor(name, kind, DATA_TYPES.get(kind), dims_of(port))


def dims_of(port: Any) -> tuple[int, ...] | None:
    """The dims of a port, -1 for a size that may vary; None if its rank may."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(ANY_SIZE if each.is_dynamic else each.get_length() for each in shape)


def bounded_shapes(model: Any, known: Collection[str]) -> Mapping[str, Any]:
    """The shapes of inputs with a dim that has bounds, such as 2..8, by name."""
    return {
        name: shape
        for name, port in named(model.inputs, known)
        if not (shape := port.get_partial_shape()).rank.is_dynamic
        and any(each.is_dynamic and _bounds(each) != UNBOUNDED for each in shape)
    }


def _bounds(dimension: Any) -> tuple[int, int]:
    return dimension.get_min_length(), dimension.get_max_length()


def check_bounds(config: ModelConfig, model: Any) -> None:
    """Raise INVALID_ARG for an input whose dims in the config are outside of the model's bounds."""
    shapes = bounded_shapes(model, input_names(config))
    for tensor in config.input:
        if tensor.name not in shapes or tensor.allow_ragged_batch:
            continue
        expected, whole = shapes[tensor.name], _whole(tensor, config)
        if not fits_bounds(whole, expected):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}', tensor '{tensor.name}': the model expects shape "
                f"{expected} but the model configuration specifies shape {format_shape(whole)}",
            )


def fits_bounds(shape: Sequence[int], expected: Any) -> bool:
    """Whether a shape, with -1 for a size that may vary, can be one of the expected."""
    return bool(openvino.PartialShape(list(shape)).compatible(expected))


def has_batches(model: Any) -> bool:
    """Whether each input and output says that its first dimension is a batch.

    By its layout, as on Triton, or because it is of any size.
    """
    return all(_has_batch(port) for port in (*model.inputs, *model.outputs))


def _has_batch(port: Any) -> bool:
    layout = openvino.layout_helpers.get_layout(port)
    by_layout = not layout.empty and openvino.layout_helpers.has_batch(layout)
    return by_layout or (dims_of(port) or ())[:1] == (ANY_SIZE,)


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model that takes the shapes and datatypes of its config.

    `rows` is the size of every batch, if an operation of the model fixes it; 0 for any.
    """

    model: Any
    rows: int

    def signature(self, config: ModelConfig) -> ModelSignature:
        """The inputs and outputs, with batches of any size also where `rows` is fixed."""
        found = signature(self.model, config)
        if not self.rows:
            return found
        return ModelSignature(_batched(found.inputs), _batched(found.outputs))


def _batched(tensors: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    return {
        name: replace(each, dims=(ANY_SIZE, *each.dims[1:])) if each.dims else each
        for name, each in tensors.items()
    }


def fit(model: Any, config: ModelConfig, *, reshapes: bool) -> FittedModel:
    """Change the model: batches of any size, the config's datatypes, and its dims if `reshapes`.

    A model that cannot be changed stays as it is.
    """
    rows = 0
    if reshapes:
        _reshape(model, {name: _whole(each, config) for name, each in _listed(model, config)})
    if config.batching:
        rows = 0 if _frees_batch(model) else _fixed_rows(model, config)
    return FittedModel(_converted(model, config), rows)


def _listed(model: Any, config: ModelConfig) -> Iterator[tuple[Any, ModelInput]]:
    known = {each.name: each for each in config.input}
    for name, port in named(model.inputs, input_names(config)):
        if name in known:
            yield port, known[name]


def _whole(tensor: ModelInput, config: ModelConfig) -> Sequence[int]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    if any(size < 1 and size != ANY_SIZE for size in dims):
        raise InferenceError(
            Code.INTERNAL,
            "openvino backend does not support dimensions values other than `-1` or positive "
            "integers",
        )
    return (ANY_SIZE, *dims) if config.batching else dims


def _reshape(model: Any, shapes: Mapping[Any, Sequence[int]]) -> None:
    model.reshape({port: openvino.PartialShape(list(shape)) for port, shape in shapes.items()})


def _frees_batch(model: Any) -> bool:
    """Let the first dimension of all inputs be of any size; without outputs of any, undo it."""
    before = {port: port.get_partial_shape() for port in model.inputs}
    with suppress(RuntimeError):
        model.reshape({port: _with_free_batch(shape) for port, shape in before.items()})
        if all((dims_of(port) or ())[:1] == (ANY_SIZE,) for port in model.outputs):
            return True
    model.reshape(before)
    return False


def _fixed_rows(model: Any, config: ModelConfig) -> int:
    """The first dimension of every input, and every output that the config lists; 0 if they differ.

    Rows are those of the batch only if they come out as they went in.
    """
    wanted = output_names(config)
    outputs = [port for name, port in named(model.outputs, wanted) if name in wanted]
    first = {(dims_of(port) or (0,))[0] for port in (*model.inputs, *outputs)}
    return max(0, *first) if len(first) == 1 else 0


def _with_free_batch(shape: Any) -> Any:
    if shape.rank.is_dynamic or not len(shape):
        return shape
    return openvino.PartialShape([openvino.Dimension(), *list(shape)[1:]])


def _converted(model: Any, config: ModelConfig) -> Any:
    """The model with the config's datatypes, which it converts from and to its own.

    A name that is only an operation's is given to the tensor: the conversion is another operation.
    """
    whole = with_sequence_tensors(config)
    steps, changed = PrePostProcessor(model), False
    sides: tuple[tuple[Any, Any, Sequence[ModelInput | ModelOutput]], ...] = (
        (model.inputs, steps.input, whole.input),
        (model.outputs, steps.output, whole.output),
    )
    for ports, step, listed in sides:
        wanted = {each.name: each.data_type for each in listed}
        for place, (name, port) in enumerate(named(ports, wanted)):
            kind = ELEMENT_TYPES.get(wanted.get(name, DataType.TYPE_INVALID), "")
            if _converts(str(port.get_element_type().get_type_name()), kind):
                port.get_tensor().add_names({name})
                step(place).tensor().set_element_type(getattr(openvino.Type, kind))
                changed = True
    return steps.build() if changed else model


def _converts(found: str, wanted: str) -> bool:
    return bool(wanted) and found != wanted and "string" not in (found, wanted)
