"""Options of metrics, logs and traces."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.errors import Code, InferenceError
from gateway.flags.values import add_truth, count, port, truth
from gateway.settings import (
    ENVIRONMENT,
    LogFormat,
    LogSettings,
    MetricsSettings,
    Settings,
    TraceSettings,
)
from gateway.span_settings import SpanSettings

ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
LATENCIES = ("counter_latencies", "histogram_latencies", "summary_latencies")
GEN_AI = "gen_ai"
QUANTILES = "summary_quantiles"
LEVELS = ("TIMESTAMPS", "TENSORS")
TRACE_LEVELS = {
    **{level.lower(): level for level in LEVELS},
    **dict.fromkeys(("min", "max", "true", "on"), "TIMESTAMPS"),
    **dict.fromkeys(("off", "false"), ""),
}
"""Levels by their names in options, in lower case; also Triton's old names."""
URL, RESOURCE = "opentelemetry,url", "opentelemetry,resource"
BATCHES = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
SIZES, SIZE_DIGITS = 1 << 32, 11
"""Settings of batches are below SIZES, and so are their first SIZE_DIGITS digits."""


def metrics_setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` of --metrics-config: the field of MetricsSettings, and its value."""
    name, _, value = text.partition("=")
    if name in LATENCIES or name == GEN_AI:
        return name, truth(value)
    if name == QUANTILES:
        return name, tuple(_quantile(each) for each in value.strip('"').split(","))
    known = ", ".join((*LATENCIES, GEN_AI, QUANTILES))
    raise argparse.ArgumentTypeError(f"got '{text}', expected NAME=VALUE with one of {known}")


def trace_setting(text: str) -> tuple[str, Any]:
    """`[MODE,]NAME=VALUE` of --trace-config: the field of TraceSettings, and its value."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(
            f"--trace-config option format is '<trace mode>,<setting>=<value>'. Got {text}"
        )
    if name not in TRACE_FIELDS:
        known = ", ".join(TRACE_FIELDS)
        raise argparse.ArgumentTypeError(f"unknown setting '{name}', expected one of {known}")
    field, read = TRACE_FIELDS[name]
    return field, read(value)


def trace_level(text: str) -> str:
    """A level by any of its names; "" for none."""
    if text.lower() in TRACE_LEVELS:
        return TRACE_LEVELS[text.lower()]
    raise argparse.ArgumentTypeError(f"invalid value for trace level option: {text.lower()}")


def trace_mode(text: str) -> str:
    """A mode: `triton` writes files, `opentelemetry` sends spans to a collector."""
    if text.lower() in ("triton", "opentelemetry"):
        return text.lower()
    raise argparse.ArgumentTypeError(
        f'invalid value for trace mode option: {text}. Available options are "triton" and '
        '"opentelemetry"'
    )


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on."""

    def number(text: str) -> int:
        if text.removeprefix("-").isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"got '{text}', expected a whole number >= {least}")

    return number


def collector(text: str) -> str:
    """The URL of a collector. Its secrets would be shown with the settings of traces."""
    parts = urlsplit(text)
    has_secret = "@" in parts.netloc or parts.query or parts.fragment
    if parts.scheme in ("http", "https") and parts.hostname and not has_secret:
        return text
    raise argparse.ArgumentTypeError(
        f"got '{text}', expected an URL such as http://localhost:4318/v1/traces, without a "
        "password, a query or a fragment: headers are in OTEL_EXPORTER_OTLP_HEADERS"
    )


def resource(text: str) -> tuple[str, str]:
    """`KEY=VALUE`, an attribute of this server."""
    name, found, value = text.partition("=")
    if name and found:
        return name, value
    raise argparse.ArgumentTypeError(f"got '{text}', expected KEY=VALUE")


def batch_setting(where: str, text: str) -> int:
    """A setting of batches of spans, with Triton's errors."""
    if not (text.isascii() and text.isdecimal()):
        reason = "Invalid option value"
    elif not 0 < int(text[:SIZE_DIGITS]) < SIZES:
        reason = "Provided option value is out of bound"
    else:
        return int(text)
    raise argparse.ArgumentTypeError(f'Bad option: "{where}".\n{reason}. Got {text}')


def span_settings(given: Sequence[tuple[str, Any]]) -> SpanSettings:
    """Settings of `mode=opentelemetry`: the options, else the variables of OpenTelemetry."""
    fields = {name.partition(",")[2]: value for name, value in given}
    fields["resource"] = tuple(value for name, value in given if name == RESOURCE)
    for name in BATCHES:
        variable = f"OTEL_{name.upper()}"
        if name not in fields and variable in ENVIRONMENT:
            try:
                fields[name] = batch_setting(variable, ENVIRONMENT[variable])
            except argparse.ArgumentTypeError as error:
                raise InferenceError(Code.INVALID_ARG, str(error)) from None
    return SpanSettings(**fields)


TRACE_FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "mode": ("mode", trace_mode),
    "level": ("levels", trace_level),
    "rate": ("rate", at_least(0)),
    "count": ("count", at_least(-1)),
    "triton,file": ("file", str),
    "triton,log-frequency": ("log_frequency", at_least(0)),
    URL: (URL, collector),
    RESOURCE: (RESOURCE, resource),
    **{
        f"opentelemetry,{name}": (
            f"opentelemetry,{name}",
            partial(batch_setting, f"--trace-config opentelemetry,{name}"),
        )
        for name in BATCHES
    },
}


def level(text: str) -> int:
    """A level of verbosity: a number, or a boolean."""
    return int(text) if text.isdigit() else int(truth(text))


def folder(text: str) -> str:
    """The path of a folder."""
    if Path(text).is_dir():
        return text
    raise argparse.ArgumentTypeError(f"'{text}' is no folder, expected one that exists")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    _add_metrics_flags(parser)
    _add_log_flags(parser)
    _add_trace_flags(parser)


def metrics_settings(flags: argparse.Namespace) -> MetricsSettings:
    """Settings of metrics."""
    return MetricsSettings(
        enabled=flags.allow_metrics,
        address=flags.metrics_address or flags.http_address,
        port=flags.metrics_port,
        open=flags.metrics_open,
        cpu=flags.allow_cpu_metrics,
        gpu=flags.allow_gpu_metrics,
        interval_ms=flags.metrics_interval_ms,
        **dict(flags.metrics_config),
    )


def log_settings(flags: argparse.Namespace) -> LogSettings:
    """Settings of the log."""
    return LogSettings(
        file=flags.log_file,
        directory=flags.log_directory,
        info=flags.log_info,
        warning=flags.log_warning,
        error=flags.log_error,
        verbose_level=flags.log_verbose,
        format=LogFormat(flags.log_format),
        escape=ENVIRONMENT.get(ESCAPE_VARIABLE) != "0",
    )


def trace_settings(flags: argparse.Namespace) -> TraceSettings:
    """Settings of traces; the last value of a field counts, levels add up."""
    levels = {level for name, level in flags.trace_config if name == "levels"}
    given = dict(flags.trace_config)
    spans = [each for each in flags.trace_config if each[0].startswith("opentelemetry,")]
    fields = {
        name: given[name] for name in ("file", "rate", "count", "log_frequency") if name in given
    }
    return TraceSettings(
        **fields,
        levels=tuple(each for each in LEVELS if each in levels),
        directory=flags.log_directory,
        spans=span_settings(spans) if given.get("mode") == "opentelemetry" else None,
    )


def _quantile(text: str) -> float:
    """`QUANTILE:ERROR`; the error is ignored: quantiles of the window are exact."""
    quantile, found, error = text.partition(":")
    if not found:
        raise argparse.ArgumentTypeError(
            f"Invalid option: [{text}]. No ':' delimiter found. Expected format is "
            "<quantile>:<error>"
        )
    try:
        numbers = float(quantile), float(error)
    except ValueError:
        numbers = (-1.0, -1.0)
    if not all(0 <= each <= 1 for each in numbers):
        raise argparse.ArgumentTypeError(
            f"Invalid option: [{text}]. Expected two numbers between 0 and 1: <quantile>:<error>"
        )
    return numbers[0]


def _add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("metrics"), MetricsSettings()
    add_truth(group, "--allow-metrics", defaults.enabled, "serve GET /metrics")
    add_truth(
        group, "--metrics-open", defaults.open, "answer /metrics without an API key or token, too"
    )
    add_truth(group, "--allow-cpu-metrics", defaults.cpu, "include metrics of CPUs and memory")
    add_truth(group, "--allow-gpu-metrics", defaults.gpu, "include metrics of GPUs")
    group.add_argument(
        "--metrics-address", default="", metavar="ADDR", help="default: as --http-address"
    )
    group.add_argument(
        "--metrics-port",
        type=port,
        default=defaults.port,
        metavar="PORT",
        help="0 picks a free one (default: %(default)s)",
    )
    group.add_argument(
        "--metrics-interval-ms",
        type=count,
        default=defaults.interval_ms,
        metavar="MS",
        help="interval of CPU utilization (milliseconds, default: %(default)s)",
    )
    group.add_argument(
        "--metrics-config",
        type=metrics_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{', '.join(LATENCIES)}, {GEN_AI}: true or false; {QUANTILES}: QUANTILE:ERROR,...",
    )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("log"), LogSettings()
    add_truth(group, "--log-info", defaults.info, "log events")
    add_truth(group, "--log-warning", defaults.warning, "log warnings")
    add_truth(group, "--log-error", defaults.error, "log errors")
    group.add_argument(
        "--log-verbose",
        type=level,
        default=defaults.verbose_level,
        metavar="LEVEL",
        help="above 0, log more lines (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=[each.value for each in LogFormat],
        default=defaults.format.value,
        help="format of the time of a line, or a JSON object a line (default: %(default)s)",
    )
    group.add_argument(
        "--log-file", default=defaults.file, metavar="FILE", help="default: the console"
    )
    group.add_argument(
        "--access-log",
        type=Path,
        metavar="FILE",
        help="append a line of JSON to this file for each request of a client, finished or "
        "refused; - for stdout (default: none)",
    )
    group.add_argument(
        "--log-directory",
        type=folder,
        default=defaults.directory,
        metavar="DIR",
        help="clients may name log and trace files below this folder "
        "(default: none, they may name no other file, as on Triton)",
    )


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traces")
    add_truth(
        group,
        "--server-timing",
        Settings().server_timing,
        "every answer says where its time went, as for a request with x-want-timing: 1",
    )
    group.add_argument(
        "--trace-config",
        type=trace_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="mode (triton, opentelemetry), level (OFF, TIMESTAMPS, TENSORS; repeatable), rate, "
        "count, triton,file, triton,log-frequency; opentelemetry,url, opentelemetry,resource "
        f"(repeatable), {', '.join(f'opentelemetry,{name}' for name in BATCHES)}",
    )
    for name in ("level", "rate", "count", "triton,file", "triton,log-frequency"):
        group.add_argument(
            f"--trace-{name.removeprefix('triton,')}",
            type=partial(_old_trace_setting, name),
            action="append",
            dest="trace_config",
            metavar="VALUE",
            help=f"deprecated: --trace-config {name}=VALUE",
        )


def _old_trace_setting(name: str, text: str) -> tuple[str, Any]:
    return trace_setting(f"{name}={text}")
