"""Prometheus' text format for metric families, as Triton writes it."""

import math
import re
from collections.abc import Iterable
from typing import Any

from gateway.backend import ExportedMetric, MetricSample

CONTENT_TYPE = "text/plain; charset=utf-8"

TEXT_TYPES = {
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
    "unknown": "untyped",
}
"""Names in the text format for types that it lacks."""

NOT_IN_LABELS = re.compile(r"[^a-zA-Z0-9_]")
RESERVED_BEGIN = re.compile(r"^__+")
UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Characters that the format cannot escape; those that read it may take them for a line's end."""
LAST_LABELS = frozenset({"le", "quantile"})


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


def label(name: str) -> str:
    """A valid label name: letters, digits and underscores, at most one of them in front."""
    return RESERVED_BEGIN.sub("_", NOT_IN_LABELS.sub("_", name))


def number(value: Any) -> str:
    """A number in the text format."""
    found = float(value)
    if math.isnan(found):
        return "NaN"
    if math.isinf(found):
        return "+Inf" if found > 0 else "-Inf"
    return str(int(found)) if found.is_integer() else repr(found)


def _exposed_name(family: ExportedMetric) -> str:
    if family.type in ("counter", "info") and family.samples:
        return str(family.samples[0].name)
    return str(family.name)


def _line(sample: MetricSample) -> str:
    ordered = sorted(sample.labels.items(), key=_label_order)
    labels = ",".join(f'{key}="{_escape(value)}"' for key, value in ordered)
    braces = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braces} {number(sample.value)}"


def _label_order(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in LAST_LABELS, label[0]


def _escape(value: str) -> str:
    if not value.isprintable():
        value = UNPRINTABLE.sub("\ufffd", value)
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
