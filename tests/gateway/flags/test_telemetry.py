"""The flags about metrics, logs and traces, and the settings they become."""

import argparse
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import telemetry as telemetry_flags
from gateway.settings import LogFormat, LogSettings, MetricsSettings, TraceSettings
from gateway.span_settings import SpanSettings


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    telemetry_flags.add_flags(parser)
    parser.add_argument("--http-address", default="0.0.0.0")
    return parser.parse_args(arguments)


def refused(*arguments: str) -> str:
    with pytest.raises(argparse.ArgumentError) as caught:
        parsed(*arguments)
    return str(caught.value)


# Metrics.


def test_without_flags_metrics_are_as_tritons() -> None:
    assert telemetry_flags.metrics_settings(parsed()) == MetricsSettings()


def test_metrics_have_the_address_of_http_by_default() -> None:
    flags = parsed("--http-address=127.0.0.1")
    assert telemetry_flags.metrics_settings(flags).address == "127.0.0.1"
    flags = parsed("--http-address=127.0.0.1", "--metrics-address=::1", "--metrics-port=0")
    found = telemetry_flags.metrics_settings(flags)
    assert (found.address, found.port) == ("::1", 0)


def test_every_metrics_flag_has_its_setting() -> None:
    flags = parsed(
        "--allow-metrics=false",
        "--allow-cpu-metrics=false",
        "--allow-gpu-metrics=false",
        "--metrics-interval-ms=500",
        "--metrics-config=counter_latencies=false",
        "--metrics-config=histogram_latencies=true",
        "--metrics-config=summary_latencies=true",
        '--metrics-config=summary_quantiles="0.5:0.05,0.9:0.01"',
    )
    assert telemetry_flags.metrics_settings(flags) == MetricsSettings(
        enabled=False,
        cpu=False,
        gpu=False,
        interval_ms=500,
        counter_latencies=False,
        histogram_latencies=True,
        summary_latencies=True,
        summary_quantiles=(0.5, 0.9),
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("nope=1", "expected NAME=VALUE with one of counter_latencies, histogram_latencies"),
        ("counter_latencies", "invalid value for bool option"),
        ("summary_latencies=perhaps", "invalid value for bool option: perhaps"),
        (
            "summary_quantiles=0.5",
            "Invalid option: [0.5]. No ':' delimiter found. Expected format is <quantile>:<error>",
        ),
        ("summary_quantiles=0.5:0.1,x:y", "Invalid option: [x:y]. Expected two numbers"),
        ("summary_quantiles=1.5:0.1", "Invalid option: [1.5:0.1]. Expected two numbers"),
        ("summary_quantiles=nan:0.1", "Invalid option: [nan:0.1]. Expected two numbers"),
    ],
)
def test_a_metrics_setting_that_cannot_be_is_refused(config: str, text: str) -> None:
    assert text in refused(f"--metrics-config={config}")


# Logs.


def test_without_flags_the_log_is_as_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_flags, "ENVIRONMENT", {})
    assert telemetry_flags.log_settings(parsed()) == LogSettings()


def test_every_log_flag_has_its_setting() -> None:
    flags = parsed(
        "--log-info=false",
        "--log-warning=false",
        "--log-error=false",
        "--log-verbose=3",
        "--log-format=ISO8601",
        "--log-file=/tmp/x",
    )
    assert telemetry_flags.log_settings(flags) == LogSettings(
        file="/tmp/x",
        info=False,
        warning=False,
        error=False,
        verbose_level=3,
        format=LogFormat.ISO8601,
    )


@pytest.mark.parametrize(("text", "level"), [("true", 1), ("false", 0), ("0", 0), ("12", 12)])
def test_a_level_may_be_a_boolean(text: str, level: int) -> None:
    assert telemetry_flags.log_settings(parsed(f"--log-verbose={text}")).verbose_level == level


@pytest.mark.parametrize("arguments", ["--log-verbose=-1", "--log-verbose=x", "--log-format=x"])
def test_a_log_flag_that_cannot_be_is_refused(arguments: str) -> None:
    assert arguments.partition("=")[0] in refused(arguments)


def test_the_folder_of_files_that_clients_name_is_that_of_logs_and_of_traces(
    tmp_path: Path,
) -> None:
    flags = parsed(f"--log-directory={tmp_path}")
    assert telemetry_flags.log_settings(flags).directory == str(tmp_path)
    assert telemetry_flags.trace_settings(flags).directory == str(tmp_path)
    text = f"'{tmp_path}/missing' is no folder, expected one that exists"
    assert text in refused(f"--log-directory={tmp_path}/missing")


@pytest.mark.parametrize(("value", "escape"), [("0", False), ("1", True)])
def test_escaping_is_switched_by_tritons_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, escape: bool
) -> None:
    variables = {telemetry_flags.ESCAPE_VARIABLE: value}
    monkeypatch.setattr(telemetry_flags, "ENVIRONMENT", variables)
    assert telemetry_flags.log_settings(parsed()).escape is escape


# Traces.


def test_without_flags_nothing_is_traced() -> None:
    assert telemetry_flags.trace_settings(parsed()) == TraceSettings()


WANTED = TraceSettings(
    file="/tmp/t.json", levels=("TIMESTAMPS", "TENSORS"), rate=5, count=7, log_frequency=3
)


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "--trace-config=level=TENSORS",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=5",
            "--trace-config=count=7",
            "--trace-config=mode=triton",
            "--trace-config=triton,file=/tmp/t.json",
            "--trace-config=triton,log-frequency=3",
        ),
        (
            "--trace-level=max",
            "--trace-level=tensors",
            "--trace-rate=5",
            "--trace-count=7",
            "--trace-file=/tmp/t.json",
            "--trace-log-frequency=3",
        ),
    ],
)
def test_traces_have_flags_old_and_new(arguments: tuple[str, ...]) -> None:
    assert telemetry_flags.trace_settings(parsed(*arguments)) == WANTED


def test_spans_have_settings_and_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"OTEL_BSP_MAX_QUEUE_SIZE": "9", "OTEL_BSP_SCHEDULE_DELAY": "8"}
    monkeypatch.setattr(telemetry_flags, "ENVIRONMENT", variables)
    flags = (
        *("mode=OpenTelemetry", "opentelemetry,url=https://collector/v1/traces"),
        *("opentelemetry,resource=a=b=c", "opentelemetry,resource=service.name=x"),
        *("opentelemetry,bsp_schedule_delay=7", "opentelemetry,bsp_max_export_batch_size=6"),
    )
    found = telemetry_flags.trace_settings(parsed(*(f"--trace-config={each}" for each in flags)))
    assert found.spans == SpanSettings(
        url="https://collector/v1/traces",
        resource=(("a", "b=c"), ("service.name", "x")),
        bsp_max_queue_size=9,
        bsp_schedule_delay=7,
        bsp_max_export_batch_size=6,
    )


def test_settings_of_spans_have_no_effect_on_files() -> None:
    flags = parsed("--trace-config=opentelemetry,url=http://x/", "--trace-config=rate=5")
    assert telemetry_flags.trace_settings(flags) == TraceSettings(rate=5)


@pytest.mark.parametrize("value", ["x", "", "0", "-1", "1.5", "4294967296", "9" * 5000])
def test_a_variable_of_batches_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(telemetry_flags, "ENVIRONMENT", {"OTEL_BSP_SCHEDULE_DELAY": value})
    with pytest.raises(InferenceError, match='Bad option: "OTEL_BSP_SCHEDULE_DELAY"'):
        telemetry_flags.trace_settings(parsed("--trace-config=mode=opentelemetry"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            "opentelemetry,bsp_max_queue_size=x",
            'Bad option: "--trace-config opentelemetry,bsp_max_queue_size".\n'
            "Invalid option value. Got x",
        ),
        (
            "opentelemetry,bsp_max_export_batch_size=4294967296",
            "Provided option value is out of bound. Got 4294967296",
        ),
        ("opentelemetry,bsp_schedule_delay=0", "out of bound. Got 0"),
        ("opentelemetry,url=localhost:4318", "expected an URL such as"),
        ("opentelemetry,url=http://user:secret@host/", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("opentelemetry,url=http://host/v1/traces?key=secret", "without a password, a query"),
        ("opentelemetry,url=http://host/v1/traces#secret", "without a password, a query"),
        ("opentelemetry,resource=x", "got 'x', expected KEY=VALUE"),
        ("opentelemetry,other=1", "unknown setting 'opentelemetry,other'"),
        (
            "bar",
            "--trace-config option format is '<trace mode>,<setting>=<value>'. Got bar",
        ),
        ("foo=1", "unknown setting 'foo'"),
        ("level=FOO", "invalid value for trace level option: foo"),
        ("rate=x", "got 'x', expected a whole number >= 0"),
        ("rate=-1", "got '-1', expected a whole number >= 0"),
        ("count=-7", "got '-7', expected a whole number >= -1"),
        (
            "mode=foo",
            'invalid value for trace mode option: foo. Available options are "triton" and '
            '"opentelemetry"',
        ),
    ],
)
def test_a_trace_setting_that_cannot_be_is_refused(config: str, text: str) -> None:
    assert text in refused(f"--trace-config={config}")


def test_off_is_no_level() -> None:
    assert telemetry_flags.trace_settings(parsed("--trace-level=OFF")).levels == ()
