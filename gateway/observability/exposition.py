"""Prometheus' text format for metric families, as Triton writes it, and OpenMetrics."""

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from gateway.backend import ExportedMetric, MetricSample
from gateway.observability.escaping import replaced

CONTENT_TYPE = "text/plain; charset=utf-8"
OPEN_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPEN_TYPE, OPEN_VERSION = "application/openmetrics-text", "version=1.0.0"
TOTAL = "_total"

TEXT_TYPES = {
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
    "unknown": "untyped",
}
"""Names in the text format for types that it lacks."""

NOT_IN_LABELS = re.compile(r"[^a-zA-Z0-9_]")
RESERVED_BEGIN = re.compile(r"^__+")
LAST_LABELS = frozenset({"le", "quantile"})
MOST_LABELS = 1 << 15
"""The sets of labels whose text is kept: each has the same text on every page."""


def render(found: Iterable[ExportedMetric]) -> bytes:
    """The families as text; one without samples is left out.

    Labels are sorted, `le` and `quantile` last. Whole numbers have no fraction.
    """
    lines: list[str] = []
    for family in found:
        if not family.samples:
            continue
        name = _exposed_name(family)
        lines.append(f"# HELP {name} {_escape_help(family.documentation)}")
        lines.append(f"# TYPE {name} {TEXT_TYPES.get(family.type, family.type)}")
        lines += [_line(s) for s in family.samples if not s.name.endswith("_created")]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def render_open(found: Iterable[ExportedMetric]) -> bytes:
    """The families in OpenMetrics 1.0.0, with exemplars.

    A counter without the suffix `_total`, such as those of Triton, keeps its name as `unknown`:
    OpenMetrics has no counter of such a name.
    """
    lines: list[str] = []
    for family in found:
        if not family.samples:
            continue
        name, kind = _exposed_name(family), "unknown" if family.type == "untyped" else family.type
        if kind == "counter" and not name.endswith(TOTAL):
            kind = "unknown"
        name = name.removesuffix("_info" if kind == "info" else TOTAL)
        lines.append(f"# TYPE {name} {kind}")
        lines.append(f"# HELP {name} {_escape(family.documentation)}")
        lines += [_open_line(s) for s in family.samples if not s.name.endswith("_created")]
    return ("\n".join(lines) + "\n# EOF\n").encode()


def reads_open_metrics(accept: str) -> bool:
    """Whether a client with that header `Accept` reads OpenMetrics 1.0.0."""
    for each in accept.split(","):
        kind, _, parameters = each.partition(";")
        if kind.strip().lower() != OPEN_TYPE:
            continue
        if OPEN_VERSION in [found.strip() for found in parameters.replace('"', "").split(";")]:
            return True
    return False


def label(name: str) -> str:
    """A valid label name: letters, digits and underscores, at most one of them in front."""
    return RESERVED_BEGIN.sub("_", NOT_IN_LABELS.sub("_", name))


def number(value: Any) -> str:
    """A number in the text format."""
    found = float(value)
    if found.is_integer():
        return str(int(found))
    if math.isnan(found):
        return "NaN"
    if math.isinf(found):
        return "+Inf" if found > 0 else "-Inf"
    return repr(found)


def _exposed_name(family: ExportedMetric) -> str:
    if family.type in ("counter", "info") and family.samples:
        return str(family.samples[0].name)
    return str(family.name)


def _line(sample: MetricSample) -> str:
    return f"{sample.name}{_kept_braces(tuple(sample.labels.items()))} {number(sample.value)}"


def _open_line(sample: MetricSample) -> str:
    bounds = {name: float(sample.labels[name]) for name in LAST_LABELS & sample.labels.keys()}
    labels = {**sample.labels, **{n: str(b).replace("inf", "+Inf") for n, b in bounds.items()}}
    line = f"{sample.name}{_kept_braces(tuple(labels.items()))} {number(sample.value)}"
    if sample.exemplar is None:
        return line
    about, value, timestamp = sample.exemplar
    moment = "" if timestamp is None else f" {timestamp:.3f}"
    return f"{line} # {_braces(about.items()) or '{}'} {number(value)}{moment}"


@lru_cache(MOST_LABELS)
def _kept_braces(labels: tuple[tuple[str, str], ...]) -> str:
    return _braces(labels)


def _braces(labels: Iterable[tuple[str, str]]) -> str:
    ordered = sorted(labels, key=_label_order)
    text = ",".join(f'{key}="{_escape(value)}"' for key, value in ordered)
    return f"{{{text}}}" if text else ""


def _label_order(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in LAST_LABELS, label[0]


def _escape(value: str) -> str:
    # Others have no escape in the format, and a reader may take them for the end of a line.
    return replaced(value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"'))


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
