"""A scheduler that runs for the length of a test, and requests that wait in a queue."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np

from gateway.backend import Instance
from gateway.config import InstanceGroup, ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.messages import InferRequest, SequenceTag
from gateway.models.model import build_scheduler
from gateway.models.sharing import Sharing, shared_among
from gateway.observability.accounts import TenantsInFlight
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.policy.caller import tenant_of
from gateway.policy.tenants import Tenants
from gateway.schedulers.execution import Entry
from gateway.schedulers.parts import OpenSequences
from gateway.schedulers.queue import QueuedRequest
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.tensor import Datatype, Tensor, array_tensor
from tests.builders import TEXT, Execution, ScriptedInstance, new_entry, soon, text_response

MS = 1_000_000
"""Nanoseconds."""

PLAIN = InstanceGroup()
"""ResourceNeeds no resources, and has no priority."""

TOKENS = ModelConfig(
    name="tokens",
    max_batch_size=64,
    input=(
        ModelInput(name="ids", data_type=DataType.TYPE_INT64, dims=(-1,)),
        ModelInput(name="mask", data_type=DataType.TYPE_INT64, dims=(-1,)),
    ),
    dynamic_batching=DynamicBatching(),
    parameters={"padded_inputs": '{"ids": 0, "mask": 0}', "batch_token_budget": "100"},
)
"""Takes sentences of any length."""


def dynamic(max_batch_size: int = 8, config: ModelConfig = TEXT, **fields: object) -> ModelConfig:
    """A config with a dynamic batcher."""
    batching = replace(DynamicBatching(), **fields)  # type: ignore[arg-type]  # by its field names
    return replace(config, max_batch_size=max_batch_size, dynamic_batching=batching)


def word(text: str, width: int = 1, **fields: object) -> InferRequest:
    """A request of one row for a model like TEXT that batches; empty words fill it to a width."""
    words = (text.encode(), *(b"",) * (width - 1))
    tensor = Tensor("text_input", Datatype.BYTES, (1, width), words)
    return replace(InferRequest(model="text", inputs=(tensor,)), **fields)  # type: ignore[arg-type]


def sentence(length: int, mask: int | None = None, rows: int = 1, **fields: object) -> InferRequest:
    """A request for TOKENS."""
    lengths = {"ids": length, "mask": length if mask is None else mask}
    inputs = tuple(
        array_tensor(name, Datatype.INT64, np.ones((rows, each), np.int64))
        for name, each in lengths.items()
    )
    return replace(InferRequest(model="tokens", inputs=inputs), **fields)  # type: ignore[arg-type]


def waiting(
    name: str = "", rows: int = 1, arrived_ms: float = 0, level: int = 0, **fields: object
) -> QueuedRequest:
    """A request as it stands in a queue; its name is the id of the request."""
    entry = new_entry(ModelStatistics(), word(name, id=name))
    return QueuedRequest(entry, rows, int(arrived_ms * MS), level, **fields)  # type: ignore[arg-type]


def names(batch: Iterable[QueuedRequest]) -> list[str]:
    """The ids of the requests."""
    return [each.entry.request.id for each in batch]


class Queue:
    """A running scheduler, and the account of the requests it was given."""

    def __init__(
        self,
        config: ModelConfig,
        limiter: ExecutionLimiter | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self.statistics = ModelStatistics()
        self.limiter = limiter
        self.keeps_sequences = config.sequence_batching is not None
        self.has_no_tasks = ScriptedInstance.has_singles
        self._sequences = count(1)
        self.scheduler = build_scheduler(config, self.statistics)
        self.fair: Sharing | None = None
        self._in_flight = TenantsInFlight()
        if tenants is not None:
            self.scheduler, self.fair = shared_among(
                tenants, self.scheduler, config, self._in_flight
            )
        self.task = asyncio.create_task(self.scheduler.run())

    def employ(
        self, concurrency: int | None = 1, resources: InstanceGroup = PLAIN
    ) -> ScriptedInstance:
        """Add an instance."""
        instance = ScriptedInstance(concurrency)
        self.add(instance, resources)
        return instance

    def add(self, instance: Instance, group: InstanceGroup = PLAIN) -> None:
        """Add an instance, with a share in the limiter if there is one."""
        share = None if self.limiter is None else self.limiter.register(group, device=0)
        self.scheduler.add(instance, share)

    def submit(self, *texts: str) -> list[Entry]:
        """Submit one request per text."""
        return [self.ask(word(text)) for text in texts]

    def ask(self, request: InferRequest) -> Entry:
        """Submit a request, if it is admitted; one of no sequence is a whole one."""
        if self.keeps_sequences and request.sequence is None:
            tag = SequenceTag(next(self._sequences), start=True, end=True)
            request = replace(request, sequence=tag)
        self.scheduler.admit(request)
        batch_size = request.inputs[0].shape[0]
        entry = new_entry(self.statistics, request, batch_size, self._ended)
        if self.fair is not None:
            entry.record.tenant = tenant = tenant_of(request.caller)
            self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
        self.scheduler.submit(entry)
        return entry

    def _ended(self, record: Record) -> None:
        """A request has ended."""
        if record.tenant is not None:
            self._in_flight.ended(record.tenant)

    @property
    def sequences(self) -> OpenSequences:
        """The open sequences of a sequence scheduler."""
        assert self.scheduler.sequences is not None
        return self.scheduler.sequences

    async def stop(self) -> None:
        """End the scheduler, as the server does when it stops."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await soon(self.task)


def asked(execution: Execution) -> list[str]:
    """The texts of the requests of one execution, in order."""
    tensors = (request.inputs[0] for request in execution.requests)
    return [element.decode() for tensor in tensors for element in tensor.elements()]


def lengths(execution: Execution) -> list[int]:
    """The lengths of the sentences of one execution."""
    return [request.inputs[0].shape[1] for request in execution.requests]


def finish(execution: Execution) -> None:
    """Answer every request with its own text or length, and end the execution."""
    for index, request in enumerate(execution.requests):
        tensor = request.inputs[0]
        text = tensor.elements()[0].decode() if tensor.name == "text_input" else tensor.shape[1]
        execution.answer(text_response(str(text), final=True), index)
    execution.end()
