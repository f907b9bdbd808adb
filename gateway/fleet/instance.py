"""The instance of a model that replicas host: each request is sent to one of them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from random import Random

from gateway.admission.timed_request import exceeded, is_exceeded
from gateway.backend import Answer, Begun, Instance, Reader
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet.call import ReplicaCall
from gateway.fleet.choice import ANY_REQUEST, Demand, KnownReplica, ReplicaState
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.continuable import NotContinued
from gateway.fleet.continuation import SentText
from gateway.fleet.metrics import ModelCounts
from gateway.fleet.moves import WaitingRequests
from gateway.fleet.offers import Key, ModelOffer
from gateway.fleet.placement import Connections, Pin, ReplicaPlacement, sequence_of
from gateway.fleet.prompts import ModelPrompts
from gateway.fleet.quarantine import ModelSuspects
from gateway.fleet.repeatable import is_failure, is_refused, is_repeatable, lacks_room
from gateway.fleet.traces import sent_to
from gateway.fleet.waiting import WaitingRoom
from gateway.generation import generates_text
from gateway.messages import InferRequest, InferResponse, Sink
from gateway.models.limits import Limits
from gateway.processes.request_terms import Routing
from gateway.processes.text_runs import read_plain_run

log = logging.getLogger("sluice.fleet")


class FleetInstance(Instance):
    """One version of a model at replicas; `connections` are all those of the router.

    `counts` are those of its requests, which a changed configuration keeps. A version in a rollout
    `is_chosen` for requests without one.

    A request whose replica is lost before its first response is sent to another one, once, unless
    its execution may have had effects. A text is continued at another one where that is right. The
    same holds if the instance at the replica dies. A request to which two of them have sent nothing
    is refused for ten minutes. One that replicas have no instance for is sent to all in turn, one
    that a replica has no room for to another one, once.
    """

    concurrency = None
    has_process = True

    def __init__(
        self,
        config: ModelConfig,
        offer: ModelOffer,
        connections: Connections,
        counts: ModelCounts,
        prompts: ModelPrompts,
        suspects: ModelSuspects,
    ) -> None:
        self.counts, self.suspects, self.adapters = counts, suspects, offer.adapters
        self.max_model_len = offer.max_model_len or None
        self.key: Key = (offer.name, offer.version)
        self.prompts, self.is_repeatable = prompts, is_repeatable(config)
        may_continue = self.is_repeatable and generates_text(config)
        self.continue_tries = Limits.read(config).continue_tries if may_continue else 0
        self.placement = ReplicaPlacement(self.key, config, connections, random := Random())
        self.waiting = WaitingRequests(self.placement.targets, random)
        self.room = WaitingRoom[RoutedRequest](config, counts, self.placement)
        self.singles, self.is_chosen = self, False

    def accepts(self, request: InferRequest) -> bool:
        """See `SingleExecutions`."""
        return True

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        """See `SingleExecutions`."""
        routed = RoutedRequest(self, request, reader)
        routed.begin()
        return routed

    @property
    def waits_for(self) -> Iterable[str]:
        """Its model at a replica, which restarts stalled instances itself."""
        return (f"{self.key[0]} at a replica",)

    def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        raise NotImplementedError("`accepts` leaves every request to `begin`")

    def send(
        self,
        routed: "RoutedRequest",
        request: InferRequest,
        replica: ReplicaConnection,
        demand: Demand,
        on_news: Callable[[], None],
    ) -> ReplicaCall:
        """Send a request, or the rest of it; raises InferenceError if it cannot be encoded."""
        known, prompt = replica.loads[self.key], routed.prompt
        self.room.prefill_rate = known.load.prefill_rate or self.room.prefill_rate
        ahead, trace = known.ahead, sent_to(replica.address, request.trace)
        chosen = self.is_chosen and not request.version
        routing = Routing(str(self.key[1]), trace, prompt, chosen)
        call = replica.call(self.key, request, on_news, demand, routing)
        replica.counts.requests += 1
        self.counts.wait.observe(call.expected_secs)
        if prompt is not None and prompt.keys:
            self.prompts.index.expect(known.id, prompt.keys, asyncio.get_running_loop().time())
        if self.is_repeatable and not routed.has_begun and sequence_of(request) is None:
            self.waiting.add(routed, known, ahead)
        return call

    def sent_text(self, request: InferRequest) -> SentText | None:
        """The text of a request, if the model continues texts."""
        return SentText(request) if self.continue_tries else None

    def suspect(self, request: InferRequest, process: str) -> None:
        """Mark a request as a suspect: its process was lost and has sent nothing of it."""
        self.counts.quarantined += self.suspects.add(request, process)

    def note_failure(self, replica: ReplicaConnection, error: InferenceError) -> None:
        """Count an error of a replica, unless it drains; a loss is counted by the connection."""
        if error.lacks_instance:
            return
        if lacks_room(error):
            replica.refuse(self.key)
        if not error.dead_instance and not is_failure(error):
            replica.answered(self.key)
        elif replica.state is ReplicaState.READY and error.dead_instance:
            replica.lose_instance(self.key, error.dead_instance)
        elif replica.state is ReplicaState.READY:
            replica.fail(self.key)

    def lost(self, replica: ReplicaConnection, when: str, error: InferenceError) -> InferenceError:
        """The error of a request whose replica was lost, or its instance there by that error."""
        text = f"model '{self.key[0]}': replica {replica.id} was lost {when}"
        if error.dead_instance:
            text = f"{error.message} (at replica {replica.id}, {when})"
        return InferenceError(Code.UNAVAILABLE, text)

    async def check_ready(self) -> None:
        if not self.placement.is_ready and self.room.reason != "":
            raise self.placement.nowhere()

    async def close(self) -> None:
        """Nothing is held between requests."""


class RoutedRequest:
    """A request at a replica, and at another one if the first is lost; without a task.

    `tried` are its replicas so far, `prompt` is that of a request of a model with tokens. While the
    reader of its responses is full, they remain in the call, whose replica then waits.
    """

    def __init__(self, instance: FleetInstance, request: InferRequest, reader: Reader) -> None:
        self._instance, self.request = instance, request
        prompts = instance.prompts
        self.prompt = prompts.read(request) if prompts.has_tokens else None
        self._reader: Reader | None = reader
        self._sink = request.sink
        self.tried: list[ReplicaConnection] = []
        self._call: ReplicaCall | None = None
        self._own_pin: Pin | None = None  # of a sequence that was unknown before it
        self.has_begun = self._call_has_begun = self._was_lost = self._waits = False
        self._sent: SentText | None = None
        self._cut: InferenceError | None = None

    def begin(self, *, may_wait: bool = True) -> None:
        """Send the request, or let it wait for a replica; an error goes to the reader."""
        try:
            self._instance.suspects.check(self.request)
            if not (may_wait and self._instance.room.takes(self)):
                self._send(self.request)
        except InferenceError as error:
            self._end(error)

    def join(self, instance: FleetInstance) -> None:
        """Belong to another instance of the model, whose room takes it over."""
        self._instance = instance

    def refuse(self, error: InferenceError) -> None:
        """See `Waiter`."""
        self._end(error)

    def demand(self) -> Demand:
        """See `Movable`."""
        if self.prompt is None:
            return ANY_REQUEST
        return self._instance.prompts.demand(self.prompt, asyncio.get_running_loop().time())

    def move(self, to: KnownReplica) -> None:
        """See `Movable`: the replica that it leaves is not one of those tried."""
        replica, call = self._instance.placement.connection_of(to), self._call
        if replica is None or call is None:
            return
        call.leave()
        self._call = None
        left = self.tried.pop()
        try:
            self._send(self.request, replica)
        except InferenceError as error:
            self._end(error)
            return
        self._instance.counts.moves += 1
        extra = {"model": self.request.model, "id": self.request.id, "left": left.address}
        log.debug("request moved", extra=extra)

    def _send(self, request: InferRequest, replica: ReplicaConnection | None = None) -> None:
        """Send a request, or the rest of it, to a replica, by default to that of least cost."""
        demand = self.demand()
        if replica is None:
            placement = self._instance.placement
            is_first = placement.pin(self.request) is self._own_pin
            replica = placement.choice(self.request, demand, self.tried)
            self._own_pin = placement.pin(self.request) if is_first else None
        self.tried.append(replica)
        self._call_has_begun = False
        self._call = self._instance.send(self, request, replica, demand, self._look)
        if self._call.is_lost:  # meanwhile
            self._look()

    def abandon(self) -> None:
        """See `Begun`."""
        self._end(None)

    def _look(self) -> None:
        """Pass on what has arrived, as far as the reader has room."""
        if self._waits:
            return
        while (call := self._call) is not None and (call.has_unread or call.is_lost):
            if self._sink is not None and self._sink.full:
                self._wait(self._sink)
                return
            try:
                if call.take_texts():
                    continue
                response = call.take()
            except InferenceError as error:
                self._fail(call, error)
                return
            if response is not None:
                self._pass_on(call, response)
            elif call.has_begun:
                self._instance.waiting.discard(self)
            if call.is_over and self._call is call:
                self._instance.suspects.executed(self.request)
                self._end(None)
            elif response is None:
                return

    def _pass_texts(self, payload: bytes) -> bool:
        """Pass the texts of a frame on together; False if they have to wait, or are not plain."""
        sent, sink = self._sent, self._sink
        if sink is None or sink.full or (sent is not None and sent.continued):
            return False
        run = read_plain_run(payload)
        if run is None:
            return False
        if sent is not None:
            sent.take_texts(run.name, run.texts, run.tokens)
        sink.put_texts(run.name, run.texts, run.tokens)
        return True

    def _pass_on(self, call: ReplicaCall, response: InferResponse) -> None:
        if not self._call_has_begun:
            self._call_has_begun = True
            call.on_texts = self._pass_texts
            self.tried[-1].answered(self._instance.key)
        if not self.has_begun:
            self.has_begun = True
            self._instance.waiting.discard(self)
            self._instance.counts.responded(call.expected_secs, call.age_secs)
            if not response.final:
                self._sent = self._instance.sent_text(self.request)
        if response.usage is not None:
            self._instance.prompts.learn(self.prompt, response.usage)
            self._instance.counts.computed(response.usage, call.expected_tokens)
        if self._sent is not None:
            try:
                joined = self._sent.take(response)
            except InferenceError as error:
                self._end(error)
                return
            if joined is None:
                return
            response = joined
        if self._reader is not None:
            self._reader.take(response)

    def _wait(self, sink: Sink) -> None:
        """Look again once the sink has room, or is done."""
        self._waits = True
        wake = asyncio.get_running_loop().create_future()
        wake.add_done_callback(self._woken)
        sink.when_room(wake)

    def _woken(self, _: object) -> None:
        self._waits = False
        self._look()

    def _fail(self, call: ReplicaCall, error: InferenceError) -> None:
        """Try another replica, or end with the error."""
        replica, is_lost = self.tried[-1], call.is_lost
        call.leave()
        self._call = None
        self._instance.waiting.discard(self)
        process = replica.id if is_lost else ""
        if error.dead_instance and not is_lost:
            process = f"{replica.id}/{error.dead_instance}"
        is_cut = bool(process) or (is_failure(error) and replica.state is not ReplicaState.READY)
        if is_cut and self._sent is not None and self._sent.is_complete:
            self._end(None)
            return
        if not is_lost:
            self._instance.note_failure(replica, error)
        if process and not self._call_has_begun:
            self._instance.suspect(self.request, process)
        try:
            if self.has_begun:
                self._continue(replica, error, is_lost=is_lost, is_cut=is_cut)
            else:
                self._repeat(replica, error, is_lost=is_lost, executed=bool(process))
        except InferenceError as found:
            self._end(found)

    def _repeat(
        self, replica: ReplicaConnection, error: InferenceError, *, is_lost: bool, executed: bool
    ) -> None:
        """Send a request without a response to another replica; raises InferenceError."""
        may_wait, has_no_room = is_refused(error, replica.state), lacks_room(error)
        has_place = sequence_of(self.request) is not None  # copies elsewhere lack the latest turn
        may_repeat = may_wait or (has_no_room and len(self.tried) == 1 and not has_place)
        if executed:
            self._instance.suspects.check(self.request)
            may_repeat = self._instance.is_repeatable and not self._was_lost
            self._was_lost = True
        if is_lost:
            effects = "" if self._instance.is_repeatable else "; it may have had effects"
            error = self._instance.lost(replica, f"while it executed the request{effects}", error)
        if not may_repeat:
            raise error
        if may_wait and not executed and self._instance.room.takes(self):
            self.tried.clear()  # the process at its address may be another one by then
            return
        try:
            self._send(self.request)
        except InferenceError:  # no other replica takes it
            raise error from None
        self._instance.counts.retries += 1
        if not has_no_room:
            self._log("request repeated", replica)

    def _continue(
        self, replica: ReplicaConnection, error: InferenceError, *, is_lost: bool, is_cut: bool
    ) -> None:
        """Send a request for the rest of a text to another replica; raises InferenceError."""
        sent = self._sent
        if sent is None:
            lost = self._instance.lost(replica, "after its first response", error)
            raise lost if is_lost else error
        when = f"after {sent.account}"
        if not is_cut:
            if self._cut is None:
                raise error
            if is_exceeded(error):
                raise exceeded(sent.tokens)
            text = f"{when}; its continuation at another one failed: {error.message}"
            raise self._instance.lost(self.tried[-2], text, self._cut)
        try:
            if sent.continued >= self._instance.continue_tries:
                raise NotContinued(f"it has been continued {sent.continued} times")
            self._instance.suspects.check(self.request)
            rest, self._cut = sent.rest(), error
            if self.prompt is not None:
                self.prompt = self._instance.prompts.read(rest)
            self._send(rest)
        except NotContinued as reason:
            raise self._instance.lost(replica, f"{when}; not continued: {reason}", error) from None
        except InferenceError as refusal:
            text = f"{when}; not continued: {refusal.message}"
            raise self._instance.lost(replica, text, error) from None
        self._instance.counts.continued += 1
        self._log("request continued", replica)

    def _log(self, event: str, replica: ReplicaConnection) -> None:
        extra = {"model": self.request.model, "id": self.request.id, "lost": replica.address}
        log.warning(event, extra=extra)

    def _end(self, error: InferenceError | None) -> None:
        if self._own_pin is not None and isinstance(error, RefusedError) and not is_exceeded(error):
            self._instance.placement.unpin(self.request, self._own_pin)
        call, self._call = self._call, None
        if call is None:
            self._instance.room.discard(self)
        else:
            call.leave()
            self._instance.waiting.discard(self)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.over(error)
