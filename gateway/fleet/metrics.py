"""Metrics of a fleet: the counts of a router, and the families of its page."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.backend import MetricReading
from gateway.messages import Usage
from gateway.observability.metrics import histogram_samples
from gateway.observability.statistics import SECONDS_BUCKETS, Histogram

REPLICAS = "gateway_fleet_replicas"
MODEL_REPLICAS = "gateway_fleet_model_replicas"
ROUTERS = "gateway_fleet_routers"
NEED = "gateway_fleet_need"
REQUESTS = "gateway_fleet_requests_total"
RETRIES = "gateway_fleet_retries_total"
CONTINUED = "gateway_fleet_continued_total"
MOVES = "gateway_fleet_moves_total"
QUARANTINED = "gateway_fleet_quarantined_total"
LOST = "gateway_fleet_lost_total"
COPIES_DROPPED = "gateway_fleet_copies_dropped_total"
HOP = "gateway_fleet_hop_seconds"
DIRECTORY_AGE = "gateway_fleet_directory_age_seconds"
WAITING = "gateway_fleet_waiting"
COLD_STARTS = "gateway_fleet_cold_starts_total"
START = "gateway_fleet_expected_start_seconds"
PROMPT_TOKENS = "gateway_fleet_prompt_tokens_total"
CACHED_TOKENS = "gateway_fleet_cached_tokens_total"
PREFIX_ERROR = "gateway_fleet_prefix_error_tokens"
WAIT = "gateway_fleet_wait_seconds"
WAIT_ERROR = "gateway_fleet_wait_error_seconds"

NAMES_BY_KIND: Mapping[str, Mapping[str, str]] = {
    "gauge": {
        REPLICAS: "Replicas of this router, by state",
        MODEL_REPLICAS: "Replicas that take new requests of a model",
        ROUTERS: "Routers that are connected to this replica",
        NEED: "Replicas that the load of this process would fully use",
        WAITING: "Requests that wait for a first replica",
        START: "Expected seconds from the first request that waits until a replica is ready",
        HOP: "Seconds from the last ping of a replica that was answered to its answer",
        DIRECTORY_AGE: "Seconds since DNS or Ray had the addresses of replicas",
    },
    "counter": {
        REQUESTS: "Requests sent to a replica: retries, continuations and moves included",
        RETRIES: "Requests sent to another replica after one was lost, failed or refused them",
        CONTINUED: "Requests for the rest of a text whose replica or instance was lost",
        MOVES: "Requests sent to another replica that serves them sooner, before they have begun",
        QUARANTINED: "Requests at a second lost replica or instance, refused for ten minutes",
        COLD_STARTS: "First replicas that requests of this router have waited for",
        PROMPT_TOKENS: "Tokens of prompts, of engines that report those in their cache",
        CACHED_TOKENS: "Those of them that the engine had in its cache",
        LOST: "Connections to a replica that ended",
        COPIES_DROPPED: "Copies of conversations that found too many bytes under way",
    },
    "histogram": {
        WAIT: "Expected seconds until the first response of a request, when it was sent",
        WAIT_ERROR: "Seconds by which first responses came sooner or later than expected",
        PREFIX_ERROR: "Tokens of prompts of which more or fewer were cached than expected",
    },
}
FLEET_METRICS = {name: text for names in NAMES_BY_KIND.values() for name, text in names.items()}
"""All families of a fleet, with their help texts."""


TOKEN_BUCKETS = (0.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0)
STARTS_KEPT = 5
"""The last starts of a model, whose mean is the next one's expected duration."""


@dataclass(slots=True)
class ReplicaCounts:
    """The counts of one replica: requests sent to it, its lost connections, dropped copies.

    `hop_secs` is the time of the last ping and its answer, None before the first one.
    """

    requests: int = 0
    losses: int = 0
    copies_dropped: int = 0
    hop_secs: float | None = None
    _pinged_at: deque[float] = field(default_factory=deque)

    def lost(self) -> None:
        """Count a lost connection."""
        self.losses += 1
        self._pinged_at.clear()

    def pinged(self, now: float) -> None:
        """Note the time of a ping."""
        self._pinged_at.append(now)

    def ponged(self, now: float) -> None:
        """Note the answer to the earliest ping without one."""
        if self._pinged_at:
            self.hop_secs = now - self._pinged_at.popleft()


class ModelCounts:
    """The counts of one version of a model at its replicas."""

    def __init__(self) -> None:
        self.retries = self.continued = self.moves = self.quarantined = 0
        self.wait = Histogram(SECONDS_BUCKETS)
        self.sooner = Histogram(SECONDS_BUCKETS)
        self.later = Histogram(SECONDS_BUCKETS)
        self.prompt_tokens = self.cached_tokens = 0
        self.more, self.fewer = Histogram(TOKEN_BUCKETS), Histogram(TOKEN_BUCKETS)
        self.cold_starts = 0
        self._start_secs: deque[float] = deque(maxlen=STARTS_KEPT)

    @property
    def start_secs(self) -> float | None:
        """The expected duration of a first replica's start; None before the first one."""
        known = self._start_secs
        return sum(known) / len(known) if known else None

    def started(self, secs: float) -> None:
        """Count the start of a first replica, from the first request that waited."""
        self.cold_starts += 1
        self._start_secs.append(secs)

    def responded(self, expected_secs: float, found_secs: float) -> None:
        """Count the first response of a request."""
        error_secs = found_secs - expected_secs
        (self.later if error_secs > 0 else self.sooner).observe(abs(error_secs))

    def computed(self, usage: Usage, expected_tokens: int) -> None:
        """Count a prompt, of which that many tokens were expected in the engine's cache."""
        if not usage.prompt_tokens or usage.cached_tokens is None:
            return
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        error = usage.cached_tokens - min(expected_tokens, usage.prompt_tokens)
        (self.fewer if error < 0 else self.more).observe(abs(error))


class FleetPage:
    """The families of a fleet, filled with values for one page."""

    def __init__(self) -> None:
        self._by_name = {
            name: MetricReading(name, text, kind)
            for kind, names in NAMES_BY_KIND.items()
            for name, text in names.items()
        }

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add a value."""
        self._by_name[name].add_sample(name, labels, value)

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add a distribution."""
        self._by_name[name].samples.extend(histogram_samples(name, labels, histogram))

    def add_replica(self, address: str, counts: ReplicaCounts) -> None:
        """Add the counts of one replica; its id would make a new series at each of its starts."""
        self.add(REQUESTS, counts.requests, replica=address)
        self.add(LOST, counts.losses, replica=address)
        self.add(COPIES_DROPPED, counts.copies_dropped, replica=address)
        if counts.hop_secs is not None:
            self.add(HOP, counts.hop_secs, replica=address)

    def add_model(self, name: str, version: int, counts: ModelCounts, replicas: int) -> None:
        """Add the counts of one version, and the number of replicas that take its requests."""
        labels = {"model": name, "version": str(version)}
        self.add(MODEL_REPLICAS, replicas, **labels)
        self.add(RETRIES, counts.retries, **labels)
        self.add(CONTINUED, counts.continued, **labels)
        self.add(MOVES, counts.moves, **labels)
        self.add(QUARANTINED, counts.quarantined, **labels)
        self.add(COLD_STARTS, counts.cold_starts, **labels)
        if counts.start_secs is not None:
            self.add(START, counts.start_secs, **labels)
        self.add_histogram(WAIT, counts.wait, **labels)
        self.add_histogram(WAIT_ERROR, counts.sooner, **labels, response="sooner")
        self.add_histogram(WAIT_ERROR, counts.later, **labels, response="later")
        self.add(PROMPT_TOKENS, counts.prompt_tokens, **labels)
        self.add(CACHED_TOKENS, counts.cached_tokens, **labels)
        self.add_histogram(PREFIX_ERROR, counts.more, **labels, cached="more")
        self.add_histogram(PREFIX_ERROR, counts.fewer, **labels, cached="fewer")

    def families(self) -> list[MetricReading]:
        """The families with values."""
        return [each for each in self._by_name.values() if each.samples]
