"""What does a freshly loaded instance execute before it is ready?"""

import asyncio
import logging
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.models.warmup_samples import Sample, failed, read_samples
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import Entry, Execution
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.warmup")


async def warm_up(
    instance: Instance,
    name: str,
    config: ModelConfig,
    folder: Path,
    statistics: ModelStatistics,
) -> None:
    """Execute the samples of a completed config on an instance that nobody else uses yet.

    `name` is the instance's, `folder` the model's, with its `warmup/`. All samples are made
    before the first is executed; the first that fails is the last. As on Triton the requests
    count in the statistics like any others. Raises InferenceError with Triton's texts.
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
    """Execute the requests together, to their ends; why some have failed."""
    entries = [_entry(request, statistics) for request in sample.requests]
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(_error(entry.stream)) for entry in entries]
        await Execution(instance, entries, statistics).run()
    return [error for reader in readers if (error := reader.result())]


async def _error(stream: ResponseStream) -> str:
    """Read a stream to its end; the message of its error, or nothing."""
    try:
        async for response in stream:
            if response.error is not None:
                return response.error.message
    except InferenceError as error:
        return error.message
    return ""


def _entry(request: InferRequest, statistics: ModelStatistics) -> Entry:
    record = Record(statistics, 1, 0, _nobody_counts)
    return Entry(request, ResponseStream(record), record)


def _nobody_counts(record: Record) -> None:
    """Called at the end of a request; none of these is in flight for the model."""
