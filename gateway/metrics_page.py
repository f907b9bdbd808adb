"""What the metrics page shows, for whoever asks: its text is made at that moment."""

from collections.abc import Callable

from gateway.dataplane import DataPlane
from gateway.models.model import Model
from gateway.observability.exposition import label, render
from gateway.observability.machine import Machine
from gateway.observability.metrics import (
    CacheReading,
    FrontendsReading,
    ModelReading,
    RecordingsReading,
    families,
)
from gateway.settings import MetricsSettings

CacheReader = Callable[[], CacheReading | None]
RecordingsReader = Callable[[], RecordingsReading | None]
FrontendsReader = Callable[[], FrontendsReading | None]


def no_cache() -> CacheReading | None:
    """What a server without a response cache has to tell of it."""
    return None


def no_recordings() -> RecordingsReading | None:
    """What a server without clients that could come back has to tell of them."""
    return None


def no_frontends() -> FrontendsReading | None:
    """What a server that has the connections itself has to tell of processes for them."""
    return None


class MetricsPage:
    """Every family of every model, of the response cache and of this machine."""

    def __init__(
        self,
        dataplane: DataPlane,
        settings: MetricsSettings,
        cache: CacheReader = no_cache,
        recordings: RecordingsReader = no_recordings,
        frontends: FrontendsReader = no_frontends,
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._cache = cache
        self._recordings = recordings
        self._frontends = frontends
        self._machine = Machine(settings)

    async def render(self) -> bytes:
        """The page in Prometheus' text format."""
        readings = [_reading(model) for model in self._dataplane.models()]
        found = families(
            readings, self._settings, self._cache(), self._recordings(), self._frontends()
        )
        found += self._machine.families()
        if self._machine.gpus is not None:
            found += await self._dataplane.threads.run(self._machine.gpus.families)
        return render(found)


def _reading(model: Model) -> ModelReading:
    return ModelReading(
        name=model.name,
        version=model.version,
        statistics=model.statistics,
        in_flight=model.in_flight,
        ready=model.ready,
        oldest_secs=model.oldest_secs(),
        families=[family for instance in model.instances for family in instance.metrics()],
        labels=_labels(model),
        cached=model.cached,
        load_secs=model.load_secs,
    )


def _labels(model: Model) -> dict[str, str]:
    tags = {label(f"_{tag}"): value for tag, value in model.config.metric_tags.items()}
    return tags | ({"namespace": model.namespace} if model.namespace else {})
