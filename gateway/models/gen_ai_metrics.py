"""Histograms of requests to language models, by OpenTelemetry's conventions for generative AI."""

import time
from collections.abc import Sequence

from gateway.backend import MetricReading
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.observability.gen_ai import OTHER_OPERATION, PROVIDER, operation_of
from gateway.observability.metrics import histogram_samples
from gateway.observability.statistics import Histogram
from gateway.observability.stream_tap import StreamTap, Tap
from gateway.observability.trace import Trace

DURATION = "gen_ai_server_request_duration_seconds"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
FAMILIES = {
    DURATION: (
        "Seconds of a request to a language model, by its error if it failed",
        tuple(0.01 * 2**power for power in range(14)),
    ),
    FIRST_TOKEN: (
        "Seconds from a request to its first output token",
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
            *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        ),
    ),
    PER_TOKEN: (
        "Seconds per output token after the first one",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
}
"""The help texts and the bounds of buckets that the conventions name."""

Labels = tuple[tuple[str, str], ...]


class GenAiMetrics:
    """The histograms of a server, by model, operation and error."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Labels, Histogram]] = {name: {} for name in FAMILIES}

    def tap(self, request: InferRequest, model: str, tap: Tap | None) -> Tap:
        """The tap that observes a request to that model, around another one if there is one."""
        return _Generation(self, request, model, tap)

    def observe(self, name: str, labels: Labels, seconds: float, trace: Trace | None) -> None:
        """Count an observation of a request with that trace."""
        histograms = self._found[name]
        histogram = histograms.get(labels)
        if histogram is None:
            histogram = histograms[labels] = Histogram(FAMILIES[name][1])
        histogram.observe(seconds, trace, time.perf_counter_ns())

    def families(self) -> list[MetricReading]:
        """The histograms of requests so far."""
        found = []
        for name, histograms in self._found.items():
            family = MetricReading(name, FAMILIES[name][0], "histogram")
            for labels, histogram in histograms.items():
                family.samples.extend(histogram_samples(name, dict(labels), histogram))
            found.append(family)
        return found


class _Generation(StreamTap):
    """One request. One without tokens is not counted."""

    def __init__(
        self, metrics: GenAiMetrics, request: InferRequest, model: str, tap: Tap | None
    ) -> None:
        super().__init__(tap)
        self._metrics = metrics
        self._operation = operation_of(request)
        self._model = model
        self._first_ns = self._last_ns = 0

    def responded(self, response: InferResponse) -> None:
        before = self.record.completion_tokens
        self.account.responded(response)
        self._note(before)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        before = self.record.completion_tokens
        self.account.delivered(name, texts, tokens)
        self._note(before)

    def ended(self, error: InferenceError | None) -> None:
        trace = self.record.trace  # the record has it no more once it has ended
        self.account.ended(error)
        operation = self._operation or (OTHER_OPERATION if self._first_ns else "")
        if not operation:
            return
        labels: Labels = (
            ("gen_ai_operation_name", operation),
            ("gen_ai_provider_name", PROVIDER),
            ("gen_ai_request_model", self._model),
        )
        received_ns, observe = self.record.received_ns, self._metrics.observe
        failed = () if error is None else (("error_type", error.code.name),)
        elapsed = (time.perf_counter_ns() - received_ns) / 1e9
        observe(DURATION, (*labels, *failed), elapsed, trace)
        if error is not None or not self._first_ns:
            return  # the conventions have the times of tokens of successful responses
        observe(FIRST_TOKEN, labels, (self._first_ns - received_ns) / 1e9, trace)
        tokens = self.record.completion_tokens
        if tokens > 1:
            spent = (self._last_ns - self._first_ns) / 1e9
            observe(PER_TOKEN, labels, spent / (tokens - 1), trace)

    def _note(self, before: int) -> None:
        """Note the time of tokens; there were as many before."""
        if self.record.completion_tokens > before:
            self._last_ns = time.perf_counter_ns()
            self._first_ns = self._first_ns or self._last_ns
