"""Trace settings as clients write and read them; the texts are Triton's."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability.trace_settings import changes, shown
from gateway.settings import TraceSettings


def test_settings_are_strings_in_tritons_order() -> None:
    settings = TraceSettings(file="/tmp/t", levels=("TIMESTAMPS",), rate=5, count=3)
    assert list(shown(settings).items()) == [
        ("trace_level", ["TIMESTAMPS"]),
        ("trace_rate", "5"),
        ("trace_count", "3"),
        ("log_frequency", "0"),
        ("trace_file", "/tmp/t"),
        ("trace_mode", "triton"),
    ]


def test_no_level_is_told_as_off() -> None:
    assert shown(TraceSettings())["trace_level"] == ["OFF"]


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
def test_what_is_wanted_becomes_fields(
    wanted: dict[str, Sequence[str] | None], found: dict[str, Any]
) -> None:
    assert changes(wanted) == found


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
def test_what_cannot_be_is_refused(
    name: str, values: Sequence[str] | None, code: Code, text: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        changes({name: values})
    assert (caught.value.code, caught.value.message) == (code, text)
