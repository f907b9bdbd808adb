"""Log settings as clients write and read them."""

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability.log_settings import changes, shown
from gateway.settings import LogFormat, LogSettings


def refused(text: str) -> InferenceError:
    return InferenceError(Code.UNAVAILABLE, f"no format: {text}")


def test_all_six_settings_are_told_in_tritons_order() -> None:
    assert list(shown(LogSettings(file="/tmp/x", verbose_level=2)).items()) == [
        ("log_file", "/tmp/x"),
        ("log_info", True),
        ("log_warning", True),
        ("log_error", True),
        ("log_verbose_level", 2),
        ("log_format", "default"),
    ]


def test_what_is_wanted_becomes_fields_and_the_unknown_is_ignored() -> None:
    wanted = {
        "log_info": False,
        "log_warning": True,
        "log_error": False,
        "log_verbose_level": 2**32 - 1,
        "log_format": "ISO8601",
        "nope": 1,
    }
    assert changes(wanted, refused) == {
        "info": False,
        "warning": True,
        "error": False,
        "verbose_level": 2**32 - 1,
        "format": LogFormat.ISO8601,
    }


@pytest.mark.parametrize(
    ("wanted", "code", "text"),
    [
        (
            {"log_file": "x"},
            Code.UNSUPPORTED,
            "log file location can not be updated through network protocol",
        ),
        ({"log_format": "x"}, Code.UNAVAILABLE, "no format: x"),
        (
            {"log_verbose_level": 2**32},
            Code.INVALID_ARG,
            "Unable to parse 'log_verbose_level', value is out of range [ 0, 4294967295 ], got: "
            "4294967296",
        ),
    ],
)
def test_what_cannot_be_is_refused(wanted: dict[str, object], code: Code, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        changes(wanted, refused)
    assert (caught.value.code, caught.value.message) == (code, text)
