"""One instance of a Python model: its worker with messages, limits and end, and its executions."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

import orjson

from backends.python.codec import CODES, RequestEncoder, to_json
from backends.python.connection import NOT_UNDERSTOOD, RETRY_SECS, FrameSocket, WorkerConnection
from backends.python.executions import ExecuteCall, WorkerExecutions
from backends.python.loading import WorkerLimits
from backends.python.quarantine import Quarantine, one_group
from backends.python.single_executions import WorkerSingles
from backends.python.worker.sluice_worker.protocol import (
    SCARCE,
    IncomingSegments,
    OutgoingSegments,
    ToGateway,
    ToWorker,
)
from backends.python.worker_process import (
    Pulse,
    Readiness,
    WorkerOutput,
    WorkerProcess,
    describe_exit,
    watch_exit,
)
from gateway.backend import Answer, Instance, MetricReading
from gateway.errors import Code, InferenceError, died
from gateway.messages import InferRequest

log = logging.getLogger("sluice.python")

LAST_WORDS_SECS = 1.0
"""Time that a worker has to exit after its connection is closed."""
FINALIZE_SECS = 30.0
"""Longest `finalize`."""


class Services(Protocol):
    """The calls that a model may make to the server; all but `ended` are synchronous."""

    def handle(self, kind: int, found: list[Any], body: memoryview) -> None:
        """Handle a message that is about no request; raises what a broken frame raises."""

    def metrics(self) -> Iterable[MetricReading]:
        """The metrics to expose for the worker's instance."""

    def waits_for(self) -> Iterable[str]:
        """The models that it has called, or is loading or unloading."""

    def cancel_abandoned(self) -> None:
        """Cancel the calls of requests whose clients have disconnected."""

    def end(self) -> None:
        """Cancel all calls: the worker has ended."""

    async def ended(self) -> None:
        """Wait until no call is in progress, after `end`."""


class RunningWorker:
    """A process that runs one model.py; made, and used, in one event loop.

    `died` becomes the reason of its end; `on_death` gets the requests that it was executing. It is
    `alive` until its end is certain.
    """

    def __init__(
        self,
        process: WorkerProcess,
        name: str,
        encoder: RequestEncoder,
        services: Callable[[WorkerConnection, WorkerExecutions], Services],
        on_death: Callable[[Sequence[InferRequest]], None],
    ) -> None:
        process.descriptors.setblocking(False)
        self.name = name
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._model = encoder.model
        self._on_death = on_death
        self.about = {"model": encoder.model, "instance": name}
        self.alive = True
        self._why = ""
        self._closing = False
        self._reply: asyncio.Future[list[Any]] | None = None
        self._link = WorkerConnection(
            FrameSocket(process.work, self._take, self._broken),
            FrameSocket(process.control, self._take_control, self._broken),
            IncomingSegments(process.descriptors),
            OutgoingSegments(process.descriptors),
        )
        self.executions = WorkerExecutions(encoder, name, self._link, self.about, self)
        self._link.work.on_read = self.executions.after_read
        self._link.control.on_read = self._link.release
        self.readiness = Readiness(self._link.control, name)
        self.services = services(self._link, self.executions)
        self._pulse = Pulse(self._link.control, self._silent)
        self._output = WorkerOutput(process.output, self.about)
        self._watch_segments()
        watch_exit(process, self._exited)

    def keep_to(self, cores: frozenset[int]) -> None:
        """Bind it to these CPU cores, if any; before it loads a model."""
        self._process.keep_to(cores)

    async def ask(self, header: Sequence[Any], answer: ToGateway) -> list[Any]:
        """Send COMPLETE, LOAD or FINALIZE, and wait for the answer.

        Raises InferenceError: code and text of FAILED, UNAVAILABLE if the worker ends.
        """
        self._reply = asyncio.get_running_loop().create_future()
        self._refuse_if_ended()
        self._link.work.send(to_json(list(header)))
        found = await self._reply
        if found[0] == ToGateway.FAILED:
            _, message, trace, code = found
            log.error("model failed", extra={**self.about, "reason": message, "trace": trace})
            raise InferenceError(CODES.get(code, Code.INTERNAL), message)
        if found[0] != answer:
            self.kill(f"it answered {found[0]}, expected {answer}")
        return found

    async def started(self, within_secs: float) -> None:
        """Wait for its first PONG; UNAVAILABLE if it ends or takes too long."""
        waits: list[asyncio.Future[Any]] = [self._pulse.started, self.died]
        await asyncio.wait(waits, timeout=within_secs, return_when=asyncio.FIRST_COMPLETED)
        if not self._pulse.started.done():
            self.kill(f"it did not start within {within_secs:g} s (stub-timeout-seconds)")
            await asyncio.shield(self.died)
        self._refuse_if_ended()

    def disconnected(self) -> None:
        """Clients have disconnected: cancel the calls that were made for them."""
        self.services.cancel_abandoned()

    def watch(self, limits: WorkerLimits) -> None:
        """Apply these limits of time, and start the health checks."""
        self.executions.limits = limits
        self._pulse.every(limits.health_check_secs)

    def kill(self, why: str) -> None:
        """Kill it; the first reason is reported."""
        self.alive = False
        self._why = self._why or why
        self._process.kill()

    async def close(self) -> None:
        """Finalize and end it; it is killed if it is busy or takes too long."""
        self._closing = True
        self.alive = False
        try:
            if not self.died.done():
                await self._finalize()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Kill it, and wait until it has ended; idempotent."""
        self._closing = True
        self.kill("it was stopped")
        await asyncio.shield(self.died)
        await self.services.ended()

    async def _finalize(self) -> None:
        if self.executions.busy:
            return
        try:
            async with asyncio.timeout(FINALIZE_SECS):
                _, error = await self.ask([ToWorker.FINALIZE], ToGateway.FINALIZED)
        except TimeoutError:
            error = [f"it has not returned within {FINALIZE_SECS:g} s", ""]
        except InferenceError as failed:
            error = [failed.message, ""]
        if error:
            fields = {"reason": error[0], "trace": error[1]}
            log.error("finalize failed", extra={**self.about, **fields})

    # Its messages.

    def _take(self, header: bytes, body: memoryview) -> None:
        found = orjson.loads(header)
        kind = found[0]
        if kind == ToGateway.EXECUTED:
            self.executions.take_executed(found, body)
        elif kind == ToGateway.RESPONSE:
            self.executions.take_response(found, body)
        elif kind == ToGateway.RELEASED:
            self._link.outgoing.freed(found[1])
            self._link.incoming.drop(found[2])
        elif kind <= ToGateway.FINALIZED:
            self._take_reply(found)
        else:
            self.services.handle(kind, found, body)

    def _take_control(self, header: bytes, body: memoryview) -> None:
        kind, *found = orjson.loads(header)
        if kind == ToGateway.PONG:
            self._pulse.answered()
        elif kind == ToGateway.READY:
            self.readiness.answered(*found)
        else:
            self._take(header, body)

    def _take_segment(self) -> None:
        """Receive a segment early: the worker blocks while too many are unreceived."""
        try:
            self._link.incoming.receive()
        except BlockingIOError:
            """It has been received already."""
        except NOT_UNDERSTOOD as error:
            # The message that names the segment raises the error.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._process.descriptors)
            if isinstance(error, OSError) and error.errno in SCARCE:
                loop.call_later(RETRY_SECS, self._watch_segments)

    def _watch_segments(self) -> None:
        if not self.died.done():
            loop = asyncio.get_running_loop()
            loop.add_reader(self._process.descriptors, self._take_segment)

    def _take_reply(self, found: list[Any]) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(found)

    # Its end.

    def _broken(self, reason: str) -> None:
        """Its connection is broken, most often because it is about to end."""
        self.alive = False
        asyncio.get_running_loop().call_later(LAST_WORDS_SECS, self.kill, reason)

    def _silent(self) -> None:
        self.kill("it did not answer a health check (health_check_secs)")

    def _exited(self, status: int) -> None:
        self.alive = False
        self._link.work.read_rest()
        suspects = self.executions.suspects
        why = f"{self._why or describe_exit(status)}."
        reason = f"its worker process ended: {why} Stub process '{self.name}' is not healthy."
        error = died(f"model '{self._model}' failed: {reason}")
        self._pulse.stop()
        self._link.close()
        asyncio.get_running_loop().remove_reader(self._process.descriptors)
        self._process.descriptors.close()
        self._output.close()
        self.services.end()
        self.executions.end(error)
        self.readiness.end(error.message)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        self.died.set_result(reason)
        if not self._closing:
            self._on_death(suspects)

    def _refuse_if_ended(self) -> None:
        if self.died.done():
            raise InferenceError(
                Code.UNAVAILABLE, f"model '{self._model}' failed: {self.died.result()}"
            )


class PythonInstance(Instance):
    """Executes in one worker, one execution at a time.

    `code` identifies the state of the model's files, for the quarantine. `checks_readiness`: the
    model has an `is_ready` of its own.
    """

    has_process = True

    def __init__(
        self,
        worker: RunningWorker,
        quarantine: Quarantine,
        code: bytes,
        *,
        checks_readiness: bool,
    ) -> None:
        self.death = worker.died
        self._worker = worker
        self._executions = worker.executions
        self._quarantine = quarantine
        if not worker.executions.decoupled:
            self.singles = WorkerSingles(worker.executions, quarantine, code)
        self._code = code
        self._checks_readiness = checks_readiness

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._worker.alive

    @property
    def metrics(self) -> Iterable[MetricReading]:
        return self._worker.services.metrics()

    @property
    def waits_for(self) -> Iterable[str]:
        return self._worker.services.waits_for()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        known = self._quarantine
        plan = (
            known.plan(self._code, requests) if known.suspects.found else one_group(len(requests))
        )
        call = ExecuteCall(requests, self._executions)
        for refused in plan.refused:
            yield refused
        for group in plan.groups:
            indexes = call.waited_for(group) if call.cancelled else group
            if not indexes:
                continue
            every = len(indexes) == len(requests)
            chosen = requests if every else [requests[index] for index in indexes]
            execution = await self._executions.begin(chosen, indexes)
            try:
                if call.cancelled:
                    call.catch_up()
                while True:
                    for answer in await execution.answers():
                        yield answer
                    if not execution.has_more:
                        break
            finally:
                self._executions.release(execution)
                if not execution.returned:
                    await execution.until_returned()
                if known.suspects.found and not execution.aborted:
                    known.survived(self._code, execution.requests)

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    async def check_ready(self) -> None:
        if self._checks_readiness:
            await self._worker.readiness.check()

    async def close(self) -> None:
        await self._worker.close()
