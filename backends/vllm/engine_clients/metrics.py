"""The metrics of an engine whose clients each count their own part."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from backends.vllm.metrics import labelled


class SharedMetrics:
    """Adds up what the clients have written into the files of a folder, at each moment."""

    def __init__(self, model: str, version: str, folder: Path) -> None:
        self._labels = {"model": model, "version": version}
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """The families at this moment."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        for family in registry.collect():
            yield labelled(family, self._labels)
