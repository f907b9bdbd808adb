"""The data plane: the entry of every request."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from gateway.admission.admission import Admission, admission_families
from gateway.admission.deadlines import PARAMETER, timed
from gateway.admission.waits import is_watched
from gateway.backend import MetricReading
from gateway.conversations.conversations import Conversations
from gateway.errors import InferenceError, Refusal, exiting, no_longer_valid
from gateway.event_loop import LoopWatch
from gateway.messages import NO_PARAMETERS, WATCHED, InferRequest, InferResponse
from gateway.models.gen_ai_metrics import GenAiMetrics
from gateway.models.index import IndexRow
from gateway.models.labels import labels_of
from gateway.models.model import Model, VersionChooser
from gateway.models.model_folder import Override
from gateway.models.repository_control import RepositoryControl
from gateway.models.resident_readings import describe, families
from gateway.observability.access_log import AccessLog
from gateway.observability.log import Log
from gateway.observability.metrics import FleetMember
from gateway.observability.receipts import Receipts
from gateway.observability.remote_metrics import remote_families
from gateway.observability.stream_tap import Tap
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.policy.audit import AuditLog
from gateway.policy.caller import Caller
from gateway.policy.tenants import Tenants
from gateway.request_name import RequestName
from gateway.rollouts.readings import rollout_families
from gateway.rollouts.rollouts import Rollouts
from gateway.rollouts.state import StateDirectory
from gateway.running_requests import RunningRequests
from gateway.settings import AdmissionSettings
from gateway.shared_memory.regions import SharedMemory
from gateway.stream import ResponseStream
from gateway.threads import LARGE_BYTES, Threads, request_threads

T = TypeVar("T")


def _note_refusal(
    trace: Trace | None,
    chooser: VersionChooser | None,
    request: InferRequest,
    model: Model | None,
    error: InferenceError,
    admission: Admission | None,
) -> None:
    """Note a refusal; limits and deadlines of clients say nothing of the chosen version."""
    if trace is not None:
        trace.refused(error)
    if request.receipt is not None:
        request.receipt.refused(request, error)
    if model is None:
        return
    model.statistics.refuse(error)
    if admission is not None:
        admission.note(request, model, error)
    if chooser is not None and not (isinstance(error, Refusal) and error.of_caller):
        chooser.refused(request, model, error)


def _continues(model: Model, request: InferRequest) -> bool:
    sequences = model.scheduler.sequences
    return sequences is not None and sequences.continues(request)


class DataPlane:
    """Resolves the model of a request, checks the request and submits it.

    `threads` decode and encode large messages; the caller that passes them closes them, as `audit`,
    which gets a line for each change, and `access_log`, which notes requests. `state_directory` has
    the state of rollouts, `receipts` makes those of requests. `fleet` is the server's part in one.
    `admission` decides about requests; None without a key file, before the first deadline.
    """

    def __init__(  # noqa: PLR0913 - the parts of a server, each by its name
        self,
        control: RepositoryControl,
        *,
        strict_readiness: bool = True,
        shared_memory: SharedMemory | None = None,
        tracer: Tracer | None = None,
        log: Log | None = None,
        threads: Threads | None = None,
        audit: AuditLog | None = None,
        access_log: AccessLog | None = None,
        state_directory: Path | None = None,
        admission: AdmissionSettings | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self.receipts = Receipts() if receipts is None else receipts
        self.threads, self.audit, self.access_log = threads or request_threads(), audit, access_log
        self.fleet: FleetMember | None = None
        self._admission_settings = admission or AdmissionSettings()
        self.admission: Admission | None = None
        self.gen_ai: GenAiMetrics | None = None
        self.loop_watch: LoopWatch | None = None
        self.tracer, self.log = tracer or Tracer(), log or Log()
        self.shared_memory = shared_memory or SharedMemory()
        self._control, self._registry = control, control.registry
        self._strict_readiness = strict_readiness
        self._exiting = self._ending_sequences = False
        self.conversations = Conversations()
        self.running = RunningRequests(control.loaded, control.registry)
        self.rollouts = Rollouts(
            *(control, self.conversations, StateDirectory(state_directory), self.threads),
            audit=audit,
        )

    def begins_without_task(self, size_bytes: int) -> bool:
        """Whether a request that has arrived as a whole may begin without a task (`BegunRequest`).

        A large one is decoded in a thread. One with a line in the access log ends when its response
        is sent.
        """
        is_logged = self.access_log is not None and self.access_log.writes
        return size_bytes <= LARGE_BYTES and not is_logged

    def infer(
        self, request: InferRequest, model: Model | None = None, trace: Trace | None = None
    ) -> ResponseStream:
        """Submit a request; its sender owns the stream and reads it inside `with`.

        Synchronous: requests are queued in the order of the calls. A turn of a conversation
        waits for the turns before it. `model` saves the look-up if the sender has just done it; the
        `model` of the stream answers: a rollout may choose another version. `trace` records the
        events of the request. Raises InferenceError if the request is refused before it is queued.
        """
        caller, chooser, interceptor, tap = request.caller, None, None, None
        try:
            if self._exiting and not self._ending_sequences:
                raise exiting()
            request = timed(request) if PARAMETER in request.parameters else request
            if model is None or model.retired:
                model = self.model(request.model, request.version, caller)
            if caller is not None and not caller.valid:
                raise no_longer_valid()
            if model.chooser is not None and (request.chosen or not request.version):
                chooser = model.chooser
                model, tap = chooser.choose(request)
            if self._exiting and not _continues(model, request):
                raise exiting()
            if request.sequence is not None and not model.of_fleet:
                interceptor = self.conversations.turn(request, model)
            allowance = None if caller is None else model.allowances.get(caller.tenant)
            if allowance is not None and (interceptor or not allowance.admits(request)):
                allowance = None
            found, is_noted = self.admission, model.recorder or self.gen_ai or self.access_log
            is_timed = request.deadline or model.max_wait_ns or (found and found.observed)
            has_account = allowance is None and found and found.tenants.configured
            if is_noted or is_timed or has_account:
                tap = self._tapped(request, model, tap, is_admitted=allowance is not None)
            stream = model.submit(request, trace, interceptor, tap=tap, limited=allowance or True)
        except InferenceError as error:
            _note_refusal(trace, chooser, request, model, error, self.admission)
            raise
        stream.request_id, stream.caller, stream.model = request.id, caller, model
        return stream

    def _tapped(
        self, request: InferRequest, model: Model, tap: Tap | None, *, is_admitted: bool
    ) -> Tap | None:
        """The tap of a request that is recorded, has an account, or is noted, around another."""
        if model.recorder is not None:
            tap = model.recorder.tap(request, tap)
        if self.gen_ai is not None:
            tap = self.gen_ai.tap(request, model.name, tap)
        if self.access_log is not None:
            tap = self.access_log.tap(request, model, tap)  # before it may be refused
        deadline, found = request.deadline, len(model.requests)
        may = deadline is not None and (deadline.asked or found >= WATCHED)
        if self.admission is None and (model.max_wait_ns or (may and is_watched(deadline, model))):
            self.admission = Admission(Tenants(), settings=self._admission_settings)
        if self.admission is not None:
            decide = self.admission.watch if is_admitted else self.admission.admit
            tap = decide(request, model, tap)
        return tap

    def limits(self, caller: Caller | None) -> Mapping[str, str]:
        """The headers of a caller's limits, on every wire; none without limits."""
        return NO_PARAMETERS if self.admission is None else self.admission.limit_headers(caller)

    def check_head(self, caller: Caller | None, model: Model | None = None) -> None:
        """Refuse a request by its head, as the admission does; raises Refusal."""
        if self.admission is not None and not self._exiting:
            self.admission.check_head(caller, model)

    def numbered(self, name: RequestName, caller: Caller | None = None) -> RequestName:
        """The name with the number of a version that has been named by its label."""
        model, version = self.address(name.model, name.version, caller)
        if self.has_label(model, version, caller):
            version = self._registry.find(model, version).version
        return name._replace(model=model, version=version)

    def call(self, request: InferRequest) -> ResponseStream:
        """Submit a request that a model makes for a request in flight.

        As `infer`, but also while the server drains: requests in flight may complete.
        """
        return self.model(request.model, request.version).call(request, limited=True)

    def model(self, name: str, version: str = "", caller: Caller | None = None) -> Model:
        """The model that serves requests of this name and version; InferenceError if none.

        None does for a caller for which it does not exist.
        """
        if caller is not None and caller.models is not None:
            name, version = self.address(name, version, caller)
            if not caller.sees(name):
                raise self._registry.absent(name)
        return self._registry.find(name, version)

    def address(
        self, name: str, version: str = "", caller: Caller | None = None
    ) -> tuple[str, str]:
        """The model and the version that a client names: `m@label` is a label of the model `m`.

        It means no model that does not exist for the caller.
        """
        if "@" not in name:
            return name, version
        found = self._registry.address(name, version)
        return found if caller is None or caller.sees(found[0]) else (name, version)

    def has_label(self, name: str, label: str, caller: Caller | None = None) -> bool:
        """Whether a version of the model has that label."""
        exists = caller is None or caller.sees(name)
        return exists and self._registry.has_label(name, label)

    def labels(self, name: str) -> Mapping[str, int]:
        """The labels of a model's versions; InferenceError as `model`."""
        return dict(sorted(self._registry.only(name).labels.items()))

    def labels_of(self, model: Model) -> tuple[str, ...]:
        """The labels of a loaded version."""
        return labels_of(self._registry, model)

    def set_labels(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Name loaded versions of a model; None removes a label. Raises InferenceError."""
        self._refuse_if_exiting()
        self.rollouts.set_labels(name, changes)

    def models(self) -> Iterator[Model]:
        """Every loaded version."""
        return self._registry.models()

    def ready_versions(self, name: str) -> list[Model]:
        """The ready versions of a model, lowest first; InferenceError if the name is unknown."""
        self._registry.find(name, "")
        return self._registry.ready_versions(name)

    async def index(self, *, ready: bool = False) -> list[IndexRow]:
        """Every model in the repositories and its versions; with `ready` only those that serve."""
        return await self._control.index(ready=ready)

    def memory(self) -> dict[str, Any]:
        """The budget of memory and the versions in it, as members of JSON."""
        return describe(self._control.residents, asyncio.get_running_loop().time())

    def families(self) -> list[MetricReading]:
        """The metrics of models in memory, object storage, rollouts, traces, and the fleet."""
        found = families(self._control.residents) + rollout_families(self.rollouts)
        found += remote_families(self._control.remote.reading()) + self.tracer.families()
        found += admission_families(self.admission, self.models())
        for part in (self.gen_ai, self.fleet):
            found += [] if part is None else part.families()
        return found

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load or reload a model; after an InferenceError the old versions still serve."""
        self._refuse_if_exiting()
        await self._control.load(name, override)

    async def unload(
        self, name: str, versions: frozenset[int] = frozenset(), *, unload_dependents: bool = False
    ) -> None:
        """Begin to unload a model, if known, or only these versions: look-ups fail from now on."""
        self._refuse_if_exiting()
        await self._control.unload(name, versions, unload_dependents=unload_dependents)

    @property
    def ready(self) -> bool:
        """Whether the server is ready (strict: and every model is)."""
        if self._exiting or not self._registry.settled:
            return False
        return not self._strict_readiness or not self._registry.failures()

    async def check_ready(self) -> bool:
        """Whether the server is ready, and (strict) the readiness check of every model passes.

        Models of a fleet do not count: one without replicas would take every router out of service.
        """
        if not self.ready or not self._strict_readiness:
            return self.ready
        checks = [model.check_ready() for model in self.models() if not model.of_fleet]
        return not any(await asyncio.gather(*checks, return_exceptions=True))

    @property
    def settled(self) -> bool:
        """Whether each start-up model has been loaded or has failed."""
        return self._registry.settled

    @property
    def exiting(self) -> bool:
        """Whether the server refuses requests, except those of open sequences."""
        return self._exiting

    @property
    def taking_requests(self) -> bool:
        """Whether the server accepts any requests: all, or only those of open sequences."""
        return not self._exiting or self._ending_sequences

    @property
    def in_flight(self) -> int:
        """Requests accepted and not yet ended."""
        return self._control.loaded.in_flight

    def refuse_requests(self) -> None:
        """Refuse requests from now on and wake the watchers of readiness."""
        self._exiting = True
        for model in self.models():
            if model.recorder is not None:
                model.recorder.end("the server exits")
        self.rollouts.drain()
        self._registry.notify()

    async def sequences_ended(self) -> None:
        """Wait until every sequence has ended; their requests are accepted until then."""
        self._ending_sequences = True
        try:
            await self._control.loaded.sequences_ended()
        finally:
            self._ending_sequences = False

    @property
    def changes(self) -> int:
        """A number that changes whenever another model may be found for a request."""
        return self._registry.changes

    async def changed(self) -> None:
        """Wait until `ready` may have changed."""
        await self._registry.changed()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._control.loaded.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with an error."""
        self._control.loaded.abandon(error)

    def _refuse_if_exiting(self) -> None:
        if self._exiting:
            raise exiting()


@dataclass(slots=True)
class BegunRequest(ABC, Generic[T]):
    """A request that was begun without a task, with the `stream` of its only response.

    The call that puts the response into the stream, or ends the stream, encodes and sends it.
    `cancel` the stream when the client disconnects.
    """

    stream: ResponseStream
    _responses: list[InferResponse] = field(default_factory=list, init=False)

    @abstractmethod
    def encode(self, response: InferResponse) -> T:
        """The answer of a response; any exception is passed to `failed`."""

    @abstractmethod
    def failed(self, error: Exception) -> T:
        """The answer of a request that failed."""

    @abstractmethod
    def send(self, answer: T) -> None:
        """Send the answer, unless the client has disconnected. Must not raise."""

    def look(self) -> None:
        """Send the answer if it is there. The listener of the stream."""
        try:
            response = self.stream.take_only(self._responses)
            if response is None:
                return
            answer = self.encode(response)
        except Exception as error:  # noqa: BLE001 - around one request in a frontend
            answer = self.failed(error)
        self.stream.close()
        self.send(answer)
