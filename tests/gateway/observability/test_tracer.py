"""Sampling of requests, trace files, and trace settings."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability.sampling import MOST_CHARS
from gateway.observability.tracer import (
    Tracer,
    read_trace_settings,
    show_trace_settings,
)
from gateway.settings import TraceSettings

TIMES = ("TIMESTAMPS",)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def started(file: Path, **fields: Any) -> Tracer:
    return Tracer(TraceSettings(file=str(file), **{"levels": TIMES, "rate": 1, **fields}))


def take(tracer: Tracer, count: int = 1, model: str = "m") -> list[int]:
    """Requests that come and end, one after the other: the numbers of their traces."""
    found = []
    for _ in range(count):
        trace = tracer.begin(model)
        if trace is not None:
            trace.stamp("A", 1)
            trace.ended(2)
            trace.sent()
            found.append(trace.id)
    return found


def written(path: Path) -> list[int]:
    """The numbers of the traces in a file, which is JSON."""
    return list(dict.fromkeys(each["id"] for each in json.loads(path.read_text())))


# Sampling.


def test_by_default_nothing_is_traced() -> None:
    tracer = Tracer()
    assert not tracer.on
    assert tracer.begin("m") is None


def test_every_request_of_the_rate_is_traced(file: Path) -> None:
    tracer = started(file, rate=3)
    assert [len(take(tracer)) for _ in range(7)] == [0, 0, 1, 0, 0, 1, 0]


def test_traces_are_numbered_from_one(file: Path) -> None:
    tracer = started(file)
    assert take(tracer, 2, "a") + take(tracer, 1, "b") == [1, 2, 3]


def test_only_the_count_is_traced_and_then_nothing_is_on(file: Path) -> None:
    tracer = started(file, count=2)
    assert len(take(tracer, 5)) == 2
    assert tracer.settings().count == 0
    assert not tracer.on


@pytest.mark.parametrize("fields", [{"levels": ()}, {"rate": 0}, {"count": 0}])
def test_some_settings_trace_nothing(file: Path, fields: dict[str, Any]) -> None:
    tracer = started(file, **fields)
    assert not tracer.on
    assert take(tracer) == []


def test_levels_without_a_file_are_a_warning_and_no_traces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sluice.trace"):
        assert not Tracer(TraceSettings(levels=TIMES)).on
    assert [record.msg for record in caplog.records] == ["nothing is traced"]


# Files.


def test_without_a_frequency_all_traces_are_one_array_at_the_end(file: Path) -> None:
    tracer = started(file)
    take(tracer, 3)
    tracer.close()
    assert written(file) == [1, 2, 3]
    assert json.loads(file.read_text())[0] == {"id": 1, "timestamps": [{"name": "A", "ns": 1}]}


def test_no_text_in_a_file_ends_a_line_or_controls_a_terminal(file: Path) -> None:
    text = "a\nb\r\x1b[31m\x9b31m\x7f\u2028\u202e\u00e9\U0001f600"
    tracer = started(file)
    trace = tracer.begin("m")
    assert trace is not None
    trace.objects.append({"id": 1, "request_id": text})
    trace.ended(2)
    trace.sent()
    tracer.close()
    written = file.read_text(encoding="utf-8")
    assert written.isprintable()
    assert json.loads(written)[0]["request_id"] == text


def test_without_a_trace_there_is_no_file(file: Path) -> None:
    started(file).close()
    assert list(file.parent.iterdir()) == []


def test_with_a_frequency_that_many_traces_make_a_file(file: Path) -> None:
    tracer = started(file, log_frequency=2)
    take(tracer, 4)
    assert [written(Path(f"{file}.{index}")) for index in (0, 1)] == [[1, 2], [3, 4]]
    take(tracer, 1)
    tracer.close()
    assert written(Path(f"{file}.2")) == [5]
    assert not file.exists()


def test_the_last_of_the_count_ends_its_file(file: Path) -> None:
    tracer = started(file, count=5)
    take(tracer, 9)
    assert written(Path(f"{file}.0")) == [1, 2, 3, 4, 5]


def test_a_count_that_is_not_reached_is_written_at_the_end(file: Path) -> None:
    tracer = started(file, count=5)
    take(tracer, 2)
    tracer.close()
    assert written(file) == [1, 2]


def test_a_new_setting_writes_the_traces_of_the_old_one(file: Path) -> None:
    tracer = started(file, log_frequency=10)
    take(tracer, 2)
    late = tracer.begin("m")
    assert late is not None
    tracer.update("", {"rate": 2})
    assert written(Path(f"{file}.0")) == [1, 2]
    late.ended(1)
    late.sent()
    assert written(Path(f"{file}.1")) == [3]


def test_many_traces_do_not_wait_for_the_end(file: Path) -> None:
    tracer = started(file)
    trace = tracer.begin("m")
    assert trace is not None
    for _ in range(10_000):
        trace.stamp("A", 1)
    trace.ended(1)
    trace.sent()
    assert file.stat().st_size > 100_000
    take(tracer)
    tracer.close()
    assert written(file) == [1, 2]


def test_a_file_that_cannot_be_written_is_logged_and_requests_succeed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = started(tmp_path / "absent" / "trace.json", log_frequency=1)
    with caplog.at_level(logging.ERROR, "sluice.trace"):
        assert len(take(tracer, 2)) == 2
        tracer.update("", {"log_frequency": 0})
        take(tracer)
        tracer.close()
    assert {record.msg for record in caplog.records} == {"traces not written"}


def test_a_reader_of_a_numbered_file_never_sees_a_part_of_it(file: Path) -> None:
    numbered = Path(f"{file}.0")
    numbered.write_text("[of an earlier process]")
    with numbered.open() as reader:
        take(started(file, log_frequency=1))
        assert reader.read() == "[of an earlier process]"
    assert written(numbered) == [1]


def test_a_numbered_file_that_cannot_be_written_leaves_no_part(file: Path) -> None:
    folder = Path(f"{file}.0")
    folder.mkdir()
    assert take(started(file, log_frequency=1)) == [1]
    assert list(file.parent.iterdir()) == [folder]


# Settings of all models, and of one.


def test_a_model_has_its_own_fields_and_those_of_all_models(file: Path) -> None:
    tracer = started(file, rate=4)
    tracer.update("m", {"rate": 2})
    assert (tracer.settings("m").rate, tracer.settings("other").rate) == (2, 4)
    tracer.update("", {"rate": 9, "log_frequency": 5})
    found = tracer.settings("m")
    assert (found.rate, found.log_frequency) == (2, 5)
    tracer.update("m", {"rate": None})
    assert tracer.settings("m") == tracer.settings("")


def test_all_models_fall_back_to_the_start(file: Path) -> None:
    tracer = started(file, rate=4)
    tracer.update("", {"rate": 9, "levels": ()})
    tracer.update("", {"rate": None, "levels": None})
    assert tracer.settings() == TraceSettings(file=str(file), levels=TIMES, rate=4)


def test_a_model_may_be_traced_alone(file: Path) -> None:
    tracer = started(file, levels=())
    tracer.update("m", {"levels": TIMES})
    assert tracer.on
    assert (len(take(tracer, 2, "m")), len(take(tracer, 2, "other"))) == (2, 0)


def test_a_model_may_be_excluded(file: Path) -> None:
    tracer = started(file)
    tracer.update("m", {"levels": ()})
    assert (take(tracer, 2, "m"), len(take(tracer, 2, "other"))) == ([], 2)


def test_a_change_does_not_bring_taken_traces_back(file: Path) -> None:
    tracer = started(file, count=5)
    take(tracer, 2)
    tracer.update("", {"count": 3})
    take(tracer, 1)
    tracer.update("", {"log_frequency": 7})
    assert tracer.settings().count == 2


def test_models_count_their_own_requests(file: Path) -> None:
    tracer = started(file, rate=2)
    tracer.update("m", {"rate": 2})
    assert take(tracer, 1, "m") == take(tracer, 1, "other") == []
    assert (len(take(tracer, 1, "m")), len(take(tracer, 1, "other"))) == (1, 1)


@pytest.mark.parametrize(
    ("path", "changes", "reason"),
    [
        ("trace.json", {"rate": 0}, "sample rate must be non-zero"),
        ("", {"levels": TIMES}, "trace file name is not given"),
    ],
)
def test_a_setting_that_cannot_trace_is_refused(
    path: str, changes: dict[str, Any], reason: str
) -> None:
    tracer = Tracer(TraceSettings(file=path, levels=TIMES))
    before = tracer.settings()
    for model in ("", "m"):
        with pytest.raises(InferenceError) as caught:
            tracer.update(model, changes)
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message == f"Attempting to set invalid trace setting :{reason}"
        assert tracer.settings(model) == before


def test_a_setting_without_levels_is_not_checked() -> None:
    tracer = Tracer()
    tracer.update("", {"rate": 0})
    assert tracer.settings().rate == 0


def test_a_refused_request_does_not_hold_back_the_others_of_the_count(file: Path) -> None:
    tracer = started(file, count=3)
    take(tracer, 1)
    refused = tracer.begin("m")
    assert refused is not None
    refused.refused()
    take(tracer, 1)
    assert written(Path(f"{file}.0")) == [1, 3]


def test_traces_wait_for_others_only_while_they_are_small(file: Path) -> None:
    tracer = started(file, count=1000)
    trace = tracer.begin("m")
    assert trace is not None
    trace.objects.append({"id": trace.id, "data": "x" * MOST_CHARS})
    trace.ended(1)
    trace.sent()
    assert written(Path(f"{file}.0")) == [1]


def test_settings_are_strings_in_tritons_order() -> None:
    settings = TraceSettings(file="/tmp/t", levels=("TIMESTAMPS",), rate=5, count=3)
    assert list(show_trace_settings(settings).items()) == [
        ("trace_level", ["TIMESTAMPS"]),
        ("trace_rate", "5"),
        ("trace_count", "3"),
        ("log_frequency", "0"),
        ("trace_file", "/tmp/t"),
        ("trace_mode", "triton"),
    ]


def test_no_level_is_shown_as_off() -> None:
    assert show_trace_settings(TraceSettings())["trace_level"] == ["OFF"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, {}),
        ({"nope": ["1"], "trace_mode": ["x"]}, {}),
        ({"trace_level": ["TENSORS", "TIMESTAMPS"]}, {"levels": ("TIMESTAMPS", "TENSORS")}),
        ({"trace_level": ["TIMESTAMPS", "XX"]}, {"levels": ("TIMESTAMPS",)}),
        ({"trace_level": ["XX"]}, {}),
        ({"trace_level": ["MAX"]}, {}),
        ({"trace_level": []}, {}),
        ({"trace_level": ["OFF"]}, {"levels": ()}),
        ({"trace_level": None}, {"levels": None}),
        ({"trace_rate": ["0"]}, {"rate": 0}),
        ({"trace_rate": ["4294967295"]}, {"rate": 4294967295}),
        ({"trace_rate": None, "trace_count": None}, {"rate": None, "count": None}),
        ({"trace_count": ["-1"]}, {"count": -1}),
        ({"log_frequency": ["7"]}, {"log_frequency": 7}),
    ],
)
def test_settings_become_fields(
    wanted: dict[str, Sequence[str] | None], found: dict[str, Any]
) -> None:
    assert read_trace_settings(wanted, Tracer().file_named) == found


def rate(text: str) -> str:
    return f"Unable to parse 'trace_rate', {text}"


RANGE = "value is out of range [ 0, 4294967295 ], got: "
NO_FILE = "trace file location can not be updated through network protocol"


@pytest.mark.parametrize(
    ("name", "values", "code", "text"),
    [
        ("trace_file", ["x"], Code.UNSUPPORTED, NO_FILE),
        ("trace_file", None, Code.UNSUPPORTED, NO_FILE),
        ("trace_rate", ["x"], Code.INVALID_ARG, rate("got: x")),
        ("trace_rate", [""], Code.INVALID_ARG, rate("got: ")),
        ("trace_rate", ["7x"], Code.INVALID_ARG, rate("got: 7x")),
        ("trace_rate", ["\u0667"], Code.INVALID_ARG, rate("got: \u0667")),
        ("trace_rate", ["1" * 99], Code.INVALID_ARG, rate(f"got: {'1' * 64}")),
        ("trace_rate", ["-1"], Code.INVALID_ARG, rate(f"{RANGE}-1")),
        ("trace_rate", ["4294967296"], Code.INVALID_ARG, rate(f"{RANGE}4294967296")),
        ("trace_rate", ["1", "2"], Code.INVALID_ARG, "expect only 1 value for 'trace_rate'"),
        (
            "trace_count",
            ["-5"],
            Code.INVALID_ARG,
            "Unable to parse 'trace_count'. Expecting value >= -1, got:-5",
        ),
        (
            "trace_count",
            ["2147483648"],
            Code.INVALID_ARG,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: "
            "2147483648",
        ),
        (
            "trace_level",
            ["OFF", "TENSORS"],
            Code.INVALID_ARG,
            "Expect only one trace level 'OFF' is specified",
        ),
    ],
)
def test_an_invalid_setting_is_refused(
    name: str, values: Sequence[str] | None, code: Code, text: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        read_trace_settings({name: values}, Tracer().file_named)
    assert (caught.value.code, caught.value.message) == (code, text)
