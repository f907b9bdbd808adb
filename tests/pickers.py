"""The metrics that endpoint pickers of the Gateway API read, by the table of `deploy/README.md`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.serving import ROOT, Serving, http_get

QUEUED, RUNNING = "--total-queued-requests-metric", "--total-running-requests-metric"
USED, ADAPTERS = "--kv-cache-usage-percentage-metric", "--lora-info-metric"
CACHE = "--cache-info-metric"
FLAGS = (QUEUED, RUNNING, USED, ADAPTERS, CACHE)
"""The flags of the picker that name metrics."""
LISTS = ("running_lora_adapters", "waiting_lora_adapters")
"""The labels with adapters."""
NONE = "none"
SPECIFICATION = re.compile(r"([\w:]+)(?:\{(\w+)=(\w+)\})?")


@dataclass(frozen=True, slots=True)
class PickerMetric:
    """The value of a flag: a family, and the labels of one of its samples."""

    name: str
    labels: Mapping[str, str]

    def samples(self, server: Serving) -> Sequence[Sample]:
        """The samples with its labels, in the order of the page; AssertionError without one."""
        status, page = http_get(server.own_ports["metrics"], "/metrics")
        assert status == 200
        families = text_string_to_metric_families(page.decode())
        (family,) = [each for each in families if each.name == self.name]
        assert family.type == "gauge", "a picker reads 0 from others"
        found = [each for each in family.samples if self.labels.items() <= each.labels.items()]
        assert found, f"{self} is not on the page"
        return found

    def value(self, server: Serving) -> float:
        """The value of the first sample, which a picker takes."""
        return float(self.samples(server)[0].value)

    def adapters(self, server: Serving) -> Mapping[str, str]:
        """The labels of the latest sample with adapters, which a picker takes of `ADAPTERS`."""
        named = [each for each in self.samples(server) if any(map(each.labels.get, LISTS))]
        return dict(max(named, key=lambda each: each.value).labels)


def picker_metrics() -> Mapping[str, Mapping[str, PickerMetric]]:
    """The metrics by the backend of the model and the flag, without those of which it has none."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "deploy" / "README.md").read_text().splitlines()
        if line.startswith("|")
    ]
    (at,) = [number for number, row in enumerate(rows) if f"`{QUEUED}`" in row]
    flags = [cell.strip("`") for cell in rows[at][1:]]
    found: dict[str, Mapping[str, PickerMetric]] = {}
    for backend, *cells in rows[at + 2 :]:
        if len(cells) != len(flags):
            break
        given = {flag: cell.strip("`") for flag, cell in zip(flags, cells, strict=True)}
        named = {flag: _metric(text) for flag, text in given.items() if text != NONE}
        found[backend.strip("`")] = named
    return found


def _metric(text: str) -> PickerMetric:
    found = SPECIFICATION.fullmatch(text)
    assert found is not None, text
    name, label, value = found.groups()
    return PickerMetric(name, {label: value} if label else {})
