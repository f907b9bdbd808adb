"""The metrics page: readings of the server's parts, rendered for Prometheus."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from gateway.dataplane import DataPlane
from gateway.models.model import Model
from gateway.observability.exposition import label, render, render_open
from gateway.observability.machine import Machine, loop_families
from gateway.observability.metrics import FrontendsReading, ModelReading, families
from gateway.observability.statistics import (
    AccessReading,
    CacheReading,
    RecordingsReading,
)
from gateway.policy.credentials import Credentials
from gateway.settings import MetricsSettings
from gateway.tls.certificates import Certificates

CacheReader = Callable[[], CacheReading | None]
RecordingsReader = Callable[[], RecordingsReading | None]
FrontendsReader = Callable[[], FrontendsReading | None]
AccessReader = Callable[[], AccessReading]


def no_reading() -> None:
    """The reading of a part that this server does not have."""


class MetricsPage:
    """The metrics of every model, of the other parts of the server, and of this machine."""

    def __init__(
        self,
        dataplane: DataPlane,
        settings: MetricsSettings,
        cache: CacheReader = no_reading,
        recordings: RecordingsReader = no_reading,
        frontends: FrontendsReader = no_reading,
        access: AccessReader | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._cache = cache
        self._recordings = recordings
        self._frontends = frontends
        self._access = access or partial(access_reading, dataplane)
        self._machine = Machine(settings)

    async def render(self, *, is_open: bool = False) -> bytes:
        """Render the current values in Prometheus' text format, or in OpenMetrics."""
        readings = [_reading(model) for model in self._dataplane.models()]
        frontends = self._frontends()
        found = families(
            readings,
            self._settings,
            self._cache(),
            self._recordings(),
            frontends,
            self._access(),
        )
        found += self._dataplane.families()
        found += self._machine.families()
        if (watch := self._dataplane.loop_watch) is not None:
            of_frontends = {} if frontends is None else {"frontends": frontends.loops}
            found += loop_families({"": watch.reading, **of_frontends})
        if self._machine.gpus is not None:
            found += await self._dataplane.threads.run(self._machine.gpus.families)
        return render_open(found) if is_open else render(found)


def access_reading(
    dataplane: DataPlane,
    credentials: Credentials | None = None,
    certificates: Sequence[Certificates] = (),
) -> AccessReading:
    """The values of the logs, the credentials and the certificates of a server."""
    audit, access_log = dataplane.audit, dataplane.access_log
    refusals = {} if credentials is None else credentials.refusals
    failures = {} if credentials is None else dict(credentials.reload_failures)
    if certificates:
        failures["certificates"] = sum(each.failures.count for each in certificates)
    return AccessReading(
        refusals={(wire, each.value): count for (wire, each), count in refusals.items()},
        reload_failures=failures,
        audit_failures=None if audit is None else audit.failures,
        access_log_dropped=None if access_log is None else access_log.dropped,
    )


def _reading(model: Model) -> ModelReading:
    labels = _labels(model)
    families = [family for instance in model.instances for family in instance.metrics]
    if model.fair is not None:
        named = {**labels, "model": model.name, "version": model.version}
        families += model.fair.families(named)
    return ModelReading(
        name=model.name,
        version=model.version,
        statistics=model.statistics,
        in_flight=len(model.requests),
        ready=model.ready,
        oldest_secs=model.requests.oldest_secs(),
        families=families,
        labels=labels,
        cached=model.cached,
        load_secs=model.load_secs,
        golden=Counter(str(each.outcome) for each in model.golden),
    )


def _labels(model: Model) -> dict[str, str]:
    tags = {label(f"_{tag}"): value for tag, value in model.config.metric_tags.items()}
    return tags | ({"namespace": model.namespace} if model.namespace else {})
