"""The metrics page: readings of the server's parts, rendered for Prometheus."""

from collections.abc import Callable

from gateway.dataplane import DataPlane
from gateway.models.model import Model
from gateway.observability.exposition import label, render
from gateway.observability.machine import Machine
from gateway.observability.metrics import ModelReading, families
from gateway.observability.statistics import (
    CacheReading,
    FrontendsReading,
    KeysReading,
    RecordingsReading,
)
from gateway.policy.credentials import Credentials
from gateway.settings import MetricsSettings

CacheReader = Callable[[], CacheReading | None]
RecordingsReader = Callable[[], RecordingsReading | None]
FrontendsReader = Callable[[], FrontendsReading | None]


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
        credentials: Credentials | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._cache = cache
        self._recordings = recordings
        self._frontends = frontends
        self._credentials = credentials
        self._machine = Machine(settings)

    async def render(self) -> bytes:
        """Render the current values in Prometheus' text format."""

        readings = [_reading(model) for model in self._dataplane.models()]
        found = families(
            readings,
            self._settings,
            self._cache(),
            self._recordings(),
            self._frontends(),
            _keys(self._credentials),
        )
        found += self._machine.families()
        if self._machine.gpus is not None:
            found += await self._dataplane.threads.run(self._machine.gpus.families)
        return render(found)


def _keys(credentials: Credentials | None) -> KeysReading | None:
    if credentials is None:
        return None
    refusals = {(wire, each.value): count for (wire, each), count in credentials.refusals.items()}
    return KeysReading(refusals=refusals, reload_failures=credentials.reload_failures)


def _reading(model: Model) -> ModelReading:
    return ModelReading(
        name=model.name,
        version=model.version,
        statistics=model.statistics,
        in_flight=len(model.requests),
        ready=model.ready,
        oldest_secs=model.requests.oldest_secs(),
        families=[family for instance in model.instances for family in instance.metrics],
        labels=_labels(model),
        cached=model.cached,
        load_secs=model.load_secs,
    )


def _labels(model: Model) -> dict[str, str]:
    tags = {label(f"_{tag}"): value for tag, value in model.config.metric_tags.items()}
    return tags | ({"namespace": model.namespace} if model.namespace else {})
