"""Admission by deadlines: the waits of models, refusals, and how true the predictions were."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gateway.admission.costs import Asked, ModelCosts
from gateway.admission.deadlines import earliest
from gateway.admission.prediction import CAUTION, WaitPrediction
from gateway.admission.timed_request import (
    TimedRequest,
    exceeded,
    is_exceeded,
    seconds,
    unreachable,
)
from gateway.backend import MetricReading
from gateway.errors import InferenceError, Refusal
from gateway.messages import WATCHED, Deadline, InferRequest
from gateway.models.model import Model
from gateway.models.sharing import in_force
from gateway.observability.metrics import histogram_samples
from gateway.observability.request_context import current_request
from gateway.observability.statistics import Histogram
from gateway.observability.stream_tap import Tap
from gateway.policy.caller import tenant_of
from gateway.policy.tenants import OTHER, Tenants
from gateway.settings import AdmissionSettings

OUTPUT_WEIGHT = 2.0
"""The service of a token of an answer in tokens of prompts: its step reads all weights."""
ONE_TENANT = ""
"""The tenant of all requests of a queue that is not fair."""
MOST_RETRY_SECS = 60.0
ROOM_SECS = 1.0
"""The age at which the room of a model is counted again."""

RATIO = "gateway_admission_wait_ratio"
RATIOS = (0.25, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 2.0, 4.0)
COUNTERS = {
    "gateway_admitted_late_total": "Admitted requests that missed their deadline",
    "gateway_admission_probes_total": "Requests admitted although they could not meet their "
    "deadline by the prediction",
    "gateway_refused_in_vain_total": "Such requests that met it all the same",
    "gateway_slo_requests_total": "Ended requests with a header x-slo-ttft-ms or x-slo-tpot-ms",
    "gateway_slo_met_total": "Such requests that got what these headers name",
}
WAIT_METRICS = {
    RATIO: "Real waits of admitted requests per predicted one, of those that had to wait",
    **COUNTERS,
}
"""The families of this module, with their help texts."""


def is_watched(deadline: Deadline | None, model: Model) -> bool:
    """Whether the waits of a model are predicted from a request with that deadline on.

    A limit of a client's own matters once WATCHED requests are in flight, and half of what a model
    executes at once: before, a request waits for fewer, or for executions that have begun. At a
    model of texts the number is enough: prefills wait for each other.
    """
    if deadline is None or deadline.asked:
        return deadline is not None
    if (found := len(model.requests)) < WATCHED or model.generates_text:
        return found >= WATCHED
    taken = found if model.config.dynamic_batching is None else model.requests.rows
    return 2 * taken >= (model.instances.room or 0)


class Waits:
    """Admits the requests of models by their deadlines.

    A model is observed, and one of `models`, from the first request on that it watches. `tenants`
    have the weights of fair queues, `jitter` is the factor of advised waits.
    """

    def __init__(
        self, settings: AdmissionSettings, tenants: Tenants, jitter: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._tenants, self._jitter = tenants, jitter
        self.models: dict[Model, ModelWaits] = {}

    def observes(self, request: InferRequest, model: Model) -> bool:
        """Whether a request counts: the model is observed, or is from this request on."""
        is_observed = model in self.models or model.max_wait_ns
        return bool(is_observed) or is_watched(request.deadline, model)

    def admit(
        self, request: InferRequest, model: Model, tap: Tap | None, costs: ModelCosts, asked: Asked
    ) -> TimedRequest:
        """The tap of a request, around another one; Refusal if it would miss its deadline."""
        waits = self.models.get(model)
        if waits is None:
            prediction = WaitPrediction(self._tenants.weight, self._tenants.label)
            waits = ModelWaits(model, prediction, costs, self._settings)
            self.models[model] = waits
            model.when_closed(partial(self._forget, model))
        try:
            return waits.admit(request, tap, asked)
        except Refusal as error:
            secs = min(error.advice.retry_after_secs * self._jitter(), MOST_RETRY_SECS)
            advice = replace(error.advice, retry_after_secs=secs)
            raise Refusal(error.refusal_reason, error.message, advice) from None

    def _forget(self, model: Model) -> None:
        self.models.pop(model, None)

    def families(self) -> list[MetricReading]:
        """The metrics; none before the first request with a deadline."""
        if not self.models:
            return []
        ratio = MetricReading(RATIO, WAIT_METRICS[RATIO], "histogram")
        counters = {name: MetricReading(name, text, "counter") for name, text in COUNTERS.items()}
        for model, waits in self.models.items():
            labels = {"model": model.name, "version": model.version}
            ratio.samples.extend(histogram_samples(RATIO, labels, waits.ratios))
            for name, value in waits.counts.items():
                counters[name].add_sample(name, labels, value)
        return [ratio, *counters.values()]


class ModelWaits:
    """The waits of one model; implements `WaitObserver`."""

    def __init__(
        self,
        model: Model,
        prediction: WaitPrediction,
        costs: ModelCosts,
        settings: AdmissionSettings,
    ) -> None:
        self.requests = model.requests
        self.prediction = prediction
        self.ratios = Histogram(RATIOS)
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._model = model
        self._costs = costs
        self._settings = settings
        self._refusals = 0
        self._room_at = -ROOM_SECS

    def admit(self, request: InferRequest, tap: Tap | None, asked: Asked) -> TimedRequest:
        """The tap of a request; Refusal if it would miss its deadline."""
        deadline, received_ns = request.deadline, request.received_ns or time.perf_counter_ns()
        if self._model.max_wait_ns:
            deadline = _with_default(deadline, received_ns + self._model.max_wait_ns)
        fair = in_force(self._model.fair)
        tenant = ONE_TENANT if fair is None else tenant_of(request.caller)
        timed = TimedRequest(self, tenant, asked, deadline, tap)
        prediction, now = self.prediction, seconds(timed.arrived_ns)
        if now - self._room_at >= ROOM_SECS:
            self._room_at, prediction.room = now, self._model.instances.room
            prediction.slack = 0 if fair is None else fair.slack
        timed.prompt_estimate = self._costs.prompt_tokens(asked)
        is_able = self._model.instances.able  # the time of a load, or of a wake, tells no wait
        timed.places = self._places(request)
        timed.waits = prediction.is_full(timed.places) or not is_able
        if is_able:
            prompt, places = timed.prompt_estimate, timed.places
            timed.raw = prediction.raw_wait(timed.tenant, prompt, now, places)
            if prediction.learnt:
                timed.predicted = timed.raw * prediction.correction(timed.tenant)
        if (logged := current_request()) is not None:
            logged.waits(deadline, timed.predicted)
        if deadline is not None:
            self._check(timed, deadline, received_ns)
        return timed

    def _places(self, request: InferRequest) -> int:
        """The places of a request, which may be malformed: one, or one for each row of a batch."""
        config = self._model.config
        if config.dynamic_batching is None or not (config.max_batch_size and request.inputs):
            return 1
        return max(1, *request.inputs[0].shape[:1])

    def _check(self, timed: TimedRequest, deadline: Deadline, received_ns: int) -> None:
        now_ns = timed.arrived_ns
        if 0 < earliest(deadline.held_first_ns, deadline.held_whole_ns) <= now_ns:
            raise exceeded(0, retries=False)
        first_ns = earliest(deadline.first_ns, deadline.whole_ns)
        if self._settings.enforce_slo and deadline.slo_first_ns:
            first_ns = earliest(first_ns, received_ns + deadline.slo_first_ns)
        refusal = None if timed.predicted is None else self._refusal(timed, first_ns, deadline)
        if refusal is None:
            return
        self._refusals += 1
        probe = self._settings.probe
        if not probe or self._refusals % probe:
            raise refusal
        timed.is_probe = True

    def _refusal(self, timed: TimedRequest, first_ns: int, deadline: Deadline) -> Refusal | None:
        """The refusal of a request that would be late by the prediction."""
        wait = timed.predicted or 0.0
        left = seconds(first_ns - timed.arrived_ns)
        if first_ns and wait > CAUTION * left:
            return unreachable(wait, left, "its first response")
        if deadline.whole_ns:
            whole = wait + self.prediction.answer_secs(timed.asked.max_tokens)
            left = seconds(deadline.whole_ns - timed.arrived_ns)
            if whole > CAUTION * left:
                return unreachable(whole, left, "its whole answer")
        return None

    def arrived(self, timed: TimedRequest, rows: int) -> None:
        """See `WaitObserver`."""
        timed.service = float(rows)
        if timed.prompt_estimate:
            answer = self.prediction.expected_tokens(timed.asked.max_tokens)
            timed.service = timed.prompt_estimate + OUTPUT_WEIGHT * timed.asked.answers * answer
        arrived = seconds(timed.arrived_ns)
        self.prediction.arrive(timed.tenant, timed.service, arrived, timed.places)
        self.counts["gateway_admission_probes_total"] += timed.is_probe

    def begun(self, timed: TimedRequest) -> None:
        """See `WaitObserver`; an answer of the response cache tells nothing of the model."""
        if timed.record.is_hit:
            return
        first = seconds(timed.first_ns)
        self.prediction.begin(timed.tenant, timed.service, first, timed.places)
        real = seconds(timed.first_ns - timed.arrived_ns)
        if timed.waits:
            self._learn(timed, real)
        else:
            self.prediction.learn_prefill(real, timed.prompt_estimate)

    def ended(self, timed: TimedRequest, error: InferenceError | None) -> None:
        """See `WaitObserver`."""
        now, is_late = seconds(timed.ended_ns), is_exceeded(error)
        if timed.first_ns and not timed.record.is_hit:
            self.prediction.end(now, timed.places)
            self._learn_tokens(timed, is_whole=error is None)
        elif is_late:
            self.prediction.expire(timed.tenant, timed.service, now, timed.places)
            if timed.waits:
                self._learn(timed, seconds(timed.ended_ns - timed.arrived_ns))
        else:
            self.prediction.leave(timed.tenant, timed.service, now, timed.places)
        if error is None or is_late:
            self._count(timed)

    def _learn(self, timed: TimedRequest, real: float) -> None:
        self.prediction.learn_wait(timed.tenant, real, timed.raw)
        if timed.predicted and not timed.is_probe:
            self.ratios.observe(real / timed.predicted)

    def _learn_tokens(self, timed: TimedRequest, *, is_whole: bool) -> None:
        made = timed.record.completion_tokens
        if not made:
            return
        self.prediction.output_tokens.add(made // timed.asked.answers)
        behind = (made - timed.first_answers) // timed.asked.answers
        if behind > 0 and is_whole:
            # Its client may take the end much later than the engine has made it.
            spent = seconds(timed.last_ns - timed.first_ns)
            self.prediction.token_secs.add(spent / behind)
        if timed.learns:
            self._costs.learn(timed.asked, OTHER, timed.record.prompt_tokens, made)

    def _count(self, timed: TimedRequest) -> None:
        deadline, counts = timed.deadline, self.counts
        if deadline.first_ns or deadline.whole_ns:
            if timed.is_probe:
                counts["gateway_refused_in_vain_total"] += timed.met_deadline
            else:
                counts["gateway_admitted_late_total"] += not timed.met_deadline
        if deadline.slo_first_ns or deadline.slo_token_ns:
            counts["gateway_slo_requests_total"] += 1
            counts["gateway_slo_met_total"] += _met_slo(timed)


def _met_slo(timed: TimedRequest) -> bool:
    """Whether a request got its first response, and each further token, as wished."""
    deadline, behind = timed.deadline, timed.ended_ns - timed.first_ns
    first_ns = timed.first_ns - timed.arrived_ns
    is_first = bool(timed.first_ns) and not 0 < deadline.slo_first_ns < first_ns
    tokens = max(1, timed.record.completion_tokens - timed.first_answers)
    return is_first and not 0 < deadline.slo_token_ns * tokens < behind


def _with_default(deadline: Deadline | None, due: int) -> Deadline:
    """A deadline with that of the model, unless the request or its RPC has one of its own."""
    found = deadline or Deadline()
    if found.held_first_ns or found.whole_ns:
        return found
    return replace(found, first_ns=earliest(found.first_ns, due), held_first_ns=due)
