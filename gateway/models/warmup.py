"""Warm-up: the samples of `model_warmup`, and their execution before a model is ready."""

import asyncio
import logging
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig, ModelWarmup, WarmupInput
from gateway.config.data_type import DataType
from gateway.data_files import DataFiles
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, request_prefix
from gateway.models.request_validation import RequestRules
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import Entry, Execution
from gateway.stream import ResponseStream
from gateway.tensor import LENGTH_BYTES, SIZES, Buffer, Datatype, Tensor

MAX_BYTES = 2**31 - 1
"""Limit of a sample's inputs, which are made in memory (bytes); that of a message on gRPC."""
LEAST_REQUEST_BYTES = 1024
"""Smallest size that a request counts as, so that empty requests are limited too (bytes)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests that execute together, `count` times."""

    name: str
    requests: tuple[InferRequest, ...]
    count: int


def failed(sample: str, reasons: str) -> InferenceError:
    """The error of a load whose warm-up has failed."""
    return InferenceError(Code.INVALID_ARG, f"failed to run warmup sample '{sample}': {reasons}")


def read_samples(config: ModelConfig, folder: Path) -> list[Sample]:
    """The samples of a completed config, in its order; batch size 0 skips a sample.

    `folder` is the model's, with its `warmup/`. Blocks. Raises InferenceError with Triton's texts
    (`ModelWarmup` of the model configuration): INVALID_ARG, or INTERNAL for an unreadable file.
    """
    files = DataFiles(config.name, folder, "warmup", "warmup data")
    return [_sample(config, each, files) for each in config.model_warmup if each.batch_size]


def _sample(config: ModelConfig, setting: ModelWarmup, files: DataFiles) -> Sample:
    _check_variable_dims(setting)
    _check_amount(config, setting)
    tensors = (_tensor(config, name, each, files) for name, each in setting.inputs.items())
    request = InferRequest(model=config.name, inputs=tuple(tensors))
    check_request(config, request)
    return Sample(setting.name, (request,) * setting.batch_size, max(1, setting.count))


def _check_variable_dims(setting: ModelWarmup) -> None:
    for name, given in setting.inputs.items():
        if min(given.dims, default=0) < 0:
            raise InferenceError(
                Code.INVALID_ARG,
                "warmup setting expects all variable-size dimensions are specified for input "
                f"'{name}'",
            )


def _check_amount(config: ModelConfig, setting: ModelWarmup) -> None:
    if setting.batch_size > max(1, config.max_batch_size):
        raise failed(
            setting.name,
            f"batch size {setting.batch_size} for '{config.name}', max allowed is "
            f"{config.max_batch_size}; ",
        )
    each = sum(_byte_size(given) for given in setting.inputs.values())
    if (size := max(each, LEAST_REQUEST_BYTES) * setting.batch_size) > MAX_BYTES:
        raise failed(
            setting.name,
            f"its inputs have {size} bytes, more than the {MAX_BYTES} that a sample may have; ",
        )


def _byte_size(given: WarmupInput) -> int:
    each = SIZES.get(given.data_type.datatype, LENGTH_BYTES) if _has_type(given) else 0
    return math.prod(given.dims) * each


def _has_type(given: WarmupInput) -> bool:
    return given.data_type is not DataType.TYPE_INVALID


def check_request(config: ModelConfig, request: InferRequest) -> None:
    """Check a request as a client's, but for the tensors of a sequence batcher."""
    if config.sequence_batching is not None:
        known = {each.name for each in config.input}
        own = tuple(tensor for tensor in request.inputs if tensor.name in known)
        request = replace(request, inputs=own)
    RequestRules(config).check(request)


def _tensor(config: ModelConfig, name: str, given: WarmupInput, files: DataFiles) -> Tensor:
    if not _has_type(given):
        wanted = {each.name: str(each.datatype) for each in config.input}
        raise _refused(
            f"inference input '{name}' data-type is '<invalid>', but model '{config.name}' "
            f"expects '{wanted.get(name, 'a datatype')}'"
        )
    datatype = given.data_type.datatype
    shape = (1, *given.dims) if config.batching else given.dims
    if given.input_data_file is not None:
        return Tensor(name, datatype, shape, _provided(given, datatype, files))
    if given.zero_data is None and given.random_data is None:
        raise _refused(f"warmup setting expects input '{name}' to have input_data_type set")
    return Tensor(name, datatype, shape, _synthetic(given, datatype))


def _synthetic(given: WarmupInput, datatype: Datatype) -> Buffer | tuple[bytes, ...]:
    """Zeros, or random bytes; strings are empty."""
    if datatype is Datatype.BYTES:
        return (b"",) * math.prod(given.dims)
    size = _byte_size(given)
    if given.random_data is None:
        return bytes(size)
    found = random.randbytes(size)
    return found.translate(_TRUTHS) if datatype is Datatype.BOOL else found


_TRUTHS = bytes(value & 1 for value in range(256))
"""A boolean that is neither 0 nor 1 is undefined behaviour in the runtimes."""


def _provided(given: WarmupInput, datatype: Datatype, files: DataFiles) -> bytes:
    """The data of a file: all of it for strings, else the bytes that the shape needs."""
    filename = given.input_data_file or ""
    if datatype is Datatype.BYTES:
        return files.read(filename, MAX_BYTES)
    expected = _byte_size(given)
    found = files.read(filename, expected)
    if len(found) < expected:
        # The missing space is Triton's.
        raise _refused(
            f"warmup setting expects {expected} bytes, but the data provided from {filename}only "
            f"has {len(found)} bytes"
        )
    return found


def _refused(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, request_prefix("") + text)


log = logging.getLogger("sluice.warmup")


async def warm_up(
    instance: Instance,
    name: str,
    config: ModelConfig,
    folder: Path,
    statistics: ModelStatistics,
) -> None:
    """Execute the samples of a completed config on a new instance.

    `name` is the instance's, `folder` the model's, with its `warmup/`. All samples are read first;
    execution stops at the first failure. As on Triton the requests count in the statistics. Raises
    InferenceError with Triton's texts.
    """
    if not config.model_warmup:
        return
    for sample in await asyncio.to_thread(read_samples, config, folder):
        for iteration in range(1, sample.count + 1):
            log.debug(
                "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                *(config.name, name, sample.name, iteration),
            )
            if errors := await _execute(instance, sample, statistics):
                raise failed(sample.name, "".join(f"{error}; " for error in errors))


async def _execute(instance: Instance, sample: Sample, statistics: ModelStatistics) -> list[str]:
    """Execute the requests together, to their ends; returns the errors."""
    entries = [entry_of(request, statistics) for request in sample.requests]
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(_error(entry.stream)) for entry in entries]
        await Execution(instance, entries, statistics).run()
    return [error for reader in readers if (error := reader.result())]


async def _error(stream: ResponseStream) -> str:
    """Read a stream to its end; returns the message of its error, or nothing."""
    try:
        async for response in stream:
            if response.error is not None:
                return response.error.message
    except InferenceError as error:
        return error.message
    return ""


def entry_of(request: InferRequest, statistics: ModelStatistics) -> Entry:
    """A request to an instance without a scheduler; it counts in the statistics."""
    record = Record(statistics, 1, 0, _not_counted)
    return Entry(request, ResponseStream(record), record)


def _not_counted(record: Record) -> None:
    """Called at the end of a request; warm-up requests are not in flight for the model."""
