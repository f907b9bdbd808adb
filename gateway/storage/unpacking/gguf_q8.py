"""Conversion of a GGUF file to one with 8-bit weights (Q8_0), by numpy alone."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
)
from gguf.quants import dequantize, quantize

from gateway.storage.unpacking.process import Report

FILE = "model.gguf"
Q8_0 = GGMLQuantizationType.Q8_0
ARCHITECTURE = "general.architecture"
FILE_TYPE, MOSTLY_Q8_0 = "general.file_type", 7
STEP = 64
"""Tensors between reports."""
OF_THE_WRITER = frozenset(
    {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", ARCHITECTURE, FILE_TYPE}
)


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write `source` with its own metadata and with quantized weights as Q8_0 into `folder`."""
    report("reading the GGUF", 0.1)
    found = GGUFReader(str(source))
    writer = GGUFWriter(folder / FILE, found.fields[ARCHITECTURE].contents())
    for field in found.fields.values():
        _copy(writer, field)
    writer.add_uint32(FILE_TYPE, MOSTLY_Q8_0)
    for tensor in found.tensors:
        _announce(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, tensor in enumerate(found.tensors):
        if number % STEP == 0:
            report("weights as 8 bits", 0.2 + 0.75 * number / len(found.tensors))
        writer.write_tensor_data(tensor.data if _stays(tensor) else _quantized(tensor))
    writer.close()


def _copy(writer: GGUFWriter, field: Any) -> None:
    """Copy an entry of the metadata that the writer does not write by itself."""
    if field.name in OF_THE_WRITER:
        return
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def _announce(writer: GGUFWriter, tensor: Any) -> None:
    if _stays(tensor):
        shape, dtype, size, kind = tensor.data.shape, tensor.data.dtype, tensor.n_bytes, None
        if dtype == np.uint8:
            kind = tensor.tensor_type
        writer.add_tensor_info(tensor.name, shape, dtype, int(size), raw_dtype=kind)
        return
    block, block_bytes = GGML_QUANT_SIZES[Q8_0]
    shape = tuple(int(each) for each in reversed(tensor.shape))
    size = int(tensor.n_elements) // block * block_bytes
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, raw_dtype=Q8_0)


def _stays(tensor: Any) -> bool:
    return tensor.tensor_type in (GGMLQuantizationType.F32, Q8_0)


def _quantized(tensor: Any) -> Any:
    return quantize(dequantize(tensor.data, tensor.tensor_type), Q8_0)
