"""The file of a model: the signature of a SavedModel, or the nodes of a GraphDef."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from backends.tensorflow.library import SavedModel, TensorFlowType, clear_failures, tf
from backends.tensorflow.parameters import TensorFlowParameters
from gateway.batches.shapes import ANY_SIZE
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.model_files import file_below
from gateway.tensor_runtime.signature import (
    ModelSignature,
    ModelTensor,
    output_names,
)

log = logging.getLogger("sluice.tensorflow")

SAVED_MODEL = "tensorflow_savedmodel"
GRAPH_DEF = "tensorflow_graphdef"
DEFAULT_FILES = {SAVED_MODEL: "model.savedmodel", GRAPH_DEF: "model.graphdef"}

DEFAULT_SIGNATURE = "serving_default"
NOT_FOR_REQUESTS = {"__saved_model_init_op", "__saved_model_train_op"}
PLACEHOLDERS = {"Placeholder", "PlaceholderWithDefault"}

DATA_TYPES = {
    "DT_BOOL": DataType.TYPE_BOOL,
    "DT_UINT8": DataType.TYPE_UINT8,
    "DT_UINT16": DataType.TYPE_UINT16,
    "DT_UINT32": DataType.TYPE_UINT32,
    "DT_UINT64": DataType.TYPE_UINT64,
    "DT_INT8": DataType.TYPE_INT8,
    "DT_INT16": DataType.TYPE_INT16,
    "DT_INT32": DataType.TYPE_INT32,
    "DT_INT64": DataType.TYPE_INT64,
    "DT_HALF": DataType.TYPE_FP16,
    "DT_FLOAT": DataType.TYPE_FP32,
    "DT_DOUBLE": DataType.TYPE_FP64,
    "DT_STRING": DataType.TYPE_STRING,
    "DT_BFLOAT16": DataType.TYPE_BF16,
}
"""Without resources, variants, complex, quantised and narrow numbers."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model's file, its signature, and the tensor of the graph for each input and output.

    `graph_def` is None for a SavedModel, which the library reads again when it opens it.
    """

    path: Path
    graph_def: Any
    signature: ModelSignature
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def is_graph_def(config: ModelConfig) -> bool:
    """Whether the model is a GraphDef; InferenceError INVALID_ARG for any third platform."""
    if config.platform not in DEFAULT_FILES:
        raise InferenceError(
            Code.INVALID_ARG,
            f"platform {config.platform} not supported for TensorFlow model '{config.name}'",
        )
    return config.platform == GRAPH_DEF


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The file of a GraphDef or the folder of a SavedModel.

    Raises InferenceError UNAVAILABLE, as Triton, if it is missing, and INVALID_ARG for a name
    outside of the version folder.
    """
    platform = GRAPH_DEF if is_graph_def(config) else SAVED_MODEL
    name = config.default_model_filename or DEFAULT_FILES[platform]
    found = file_below(folder, folder, name, config)
    if not (found.is_file() if platform == GRAPH_DEF else found.is_dir()):
        shown = Path(folder.name, found.relative_to(folder))
        raise InferenceError(
            Code.UNAVAILABLE, f"unable to find '{shown}' for model instance '{config.name}'"
        )
    return found


def read_model(config: ModelConfig, folder: Path, parameters: TensorFlowParameters) -> ModelFile:
    """Read the file without opening it; InferenceError if it cannot be read."""
    path = find_model(config, folder)
    if is_graph_def(config):
        return _read_graph_def(config, folder, path)
    return _read_saved_model(config, folder, path, parameters)


# SavedModels.


def _read_saved_model(
    config: ModelConfig, folder: Path, path: Path, parameters: TensorFlowParameters
) -> ModelFile:
    signatures = _tagged(_parsed(config, folder, path), config, parameters.tag).signature_def
    chosen = signatures[_signature_key(signatures, config, parameters)]
    return ModelFile(
        path,
        None,
        ModelSignature(_declared(chosen.inputs), _declared(chosen.outputs)),
        {name: each.name for name, each in chosen.inputs.items()},
        {name: each.name for name, each in chosen.outputs.items()},
    )


def _parsed(config: ModelConfig, folder: Path, path: Path) -> Any:
    saved, what = SavedModel(), f"unable to load model '{config.name}'"
    with clear_failures(folder, f"{what}: '{folder.name}/{path.name}' cannot be read"):
        if (binary := path / "saved_model.pb").is_file():
            saved.ParseFromString(binary.read_bytes())
        elif (text := path / "saved_model.pbtxt").is_file():
            text_format.Parse(text.read_text(), saved)
        else:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"unable to find '{folder.name}/{path.name}/saved_model.pb' for model instance "
                f"'{config.name}'",
            )
    return saved


def _tagged(saved: Any, config: ModelConfig, tag: str) -> Any:
    for each in saved.meta_graphs:
        if set(each.meta_info_def.tags) == {tag}:
            return each
    known = [" and ".join(sorted(each.meta_info_def.tags)) for each in saved.meta_graphs]
    raise InferenceError(
        Code.INVALID_ARG,
        f"unable to load model '{config.name}', expected '{tag}' tag; tags of the SavedModel: "
        f"{', '.join(sorted(known)) or 'none'}",
    )


def _signature_key(
    signatures: Mapping[str, Any], config: ModelConfig, parameters: TensorFlowParameters
) -> str:
    """The signature that is asked for, or the default one, or else the first for requests."""
    wanted = parameters.signature or DEFAULT_SIGNATURE
    if wanted in signatures:
        return wanted
    others = sorted(set(signatures) - NOT_FOR_REQUESTS)
    if parameters.signature or not others:
        raise InferenceError(
            Code.INVALID_ARG,
            f"unable to load model '{config.name}', expected '{wanted}' signature; signatures of "
            f"the SavedModel: {', '.join(others) or 'none'}",
        )
    log.warning(
        "default signature missing, another one used",
        extra={"model": config.name, "signature": others[0]},
    )
    return others[0]


def _declared(tensors: Mapping[str, Any]) -> dict[str, ModelTensor]:
    return {name: _tensor(name, tensors[name]) for name in sorted(tensors)}


def _tensor(name: str, info: Any) -> ModelTensor:
    kind = TensorFlowType.Name(info.dtype)
    if info.WhichOneof("encoding") != "name":
        return ModelTensor(name, f"sparse or composite tensor of {kind}", None, None)
    shape = info.tensor_shape
    dims = None if shape.unknown_rank else tuple(each.size for each in shape.dim)
    return ModelTensor(name, kind, DATA_TYPES.get(kind), dims)


# GraphDefs.


def _read_graph_def(config: ModelConfig, folder: Path, path: Path) -> ModelFile:
    what = f"unable to load model '{config.name}'"
    graph_def = tf.GraphDef()
    with clear_failures(folder, f"{what}: '{folder.name}/{path.name}' cannot be read"):
        graph_def.ParseFromString(path.read_bytes())
    if not graph_def.node:
        raise InferenceError(Code.INTERNAL, f"model {config.name} has an empty network")
    graph = tf.Graph()
    with clear_failures(folder, what), graph.as_default():
        tf.import_graph_def(graph_def, name="")
    operations = {each.name: each for each in graph.get_operations() if each.outputs}
    inputs = [name for name, each in operations.items() if each.type in PLACEHOLDERS]
    outputs = {*_ends(operations.values()), *output_names(config)}.difference(inputs)
    signature = ModelSignature(
        _computed(graph, operations, inputs), _computed(graph, operations, sorted(outputs))
    )
    return ModelFile(
        path,
        graph_def,
        signature,
        {name: _port(name) for name in signature.inputs},
        {name: _port(name) for name in signature.outputs},
    )


def _ends(operations: Iterable[Any]) -> list[str]:
    """The operations with outputs that no other operation takes."""
    return [
        each.name for each in operations if not any(output.consumers() for output in each.outputs)
    ]


def _computed(
    graph: Any, operations: Mapping[str, Any], names: Iterable[str]
) -> dict[str, ModelTensor]:
    """The first output of each operation, or that with the number after a colon."""
    found = {}
    for name in names:
        operation, _, number = name.partition(":")
        place = int(number) if number.isdecimal() else 0
        if operation in operations and place < len(operations[operation].outputs):
            tensor = operations[operation].outputs[place]
            kind = TensorFlowType.Name(tensor.dtype.as_datatype_enum)
            found[name] = ModelTensor(name, kind, DATA_TYPES.get(kind), _dims(tensor.shape))
    return found


def _dims(shape: Any) -> tuple[int, ...] | None:
    if shape.rank is None:
        return None
    return tuple(ANY_SIZE if size is None else size for size in shape.as_list())


def _port(name: str) -> str:
    return name if ":" in name else f"{name}:0"
