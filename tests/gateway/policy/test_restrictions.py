"""The options that restrict areas, and the check of a header."""

import re
from pathlib import Path

import pytest

from gateway.policy.areas import Area
from gateway.policy.restrictions import Restriction, read_restrictions

GROUPS = ("health,metadata:X-Key=a=b", "logging:other=1")


def test_each_group_restricts_its_areas_to_one_header() -> None:
    found = read_restrictions(GROUPS, "api")
    assert list(found) == [Area.HEALTH, Area.METADATA, Area.LOGGING]
    assert found[Area.HEALTH] == found[Area.METADATA] == Restriction.of("X-Key", "a=b")
    assert (found[Area.HEALTH].shown, found[Area.HEALTH].name) == ("X-Key", "x-key")


def test_no_option_restricts_nothing() -> None:
    assert read_restrictions((), "api") == {}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["helth:k=v"], "unknown restricted api 'helth', expected one of health, metadata, "),
        (["playground:k=v"], "unknown restricted api 'playground'"),
        (["health,:k=v"], "unknown restricted api ''"),
        (["Health:k=v"], "unknown restricted api 'Health'"),
        (
            ["health:k=v", "logging,health:k=v"],
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (["health"], "'health=': expected AREA[,AREA...]:NAME=VALUE"),
        (["health:k"], "'health:k=': expected AREA[,AREA...]:NAME=VALUE"),
        (["health:k="], "'health:k=': expected AREA[,AREA...]:NAME=VALUE"),
        (["health:=v"], "'health:=': expected AREA[,AREA...]:NAME=VALUE"),
        ([":k=v"], "':k=': expected AREA[,AREA...]:NAME=VALUE"),
        (["health:k\n=v"], "expected AREA[,AREA...]:NAME=VALUE"),
        (["health: k=v"], "expected AREA[,AREA...]:NAME=VALUE"),
        (["health:a:b=v"], "expected AREA[,AREA...]:NAME=VALUE"),
        (["health:é=v"], "expected AREA[,AREA...]:NAME=VALUE"),
        (["health:k= v"], "the value begins or ends with a blank"),
        (["health:k=a\nb"], "the value begins or ends with a blank or has control characters"),
    ],
)
def test_a_wrong_group_is_refused_by_what_is_wrong(groups: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_restrictions(groups, "api")


@pytest.mark.parametrize(
    "group",
    [
        "health,k=secret",
        "health=secret",
        "k=sec:ret",
        "a,k=secret",
        "health:k:=secret",
        "x:k=secret",
    ],
)
def test_the_value_of_a_wrong_group_is_not_in_the_error(group: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        read_restrictions([group], "api")
    assert "sec" not in str(caught.value)


def test_a_value_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("secret\n")
    found = read_restrictions([f"health:k=@{file}"], "api")[Area.HEALTH]
    assert found == Restriction.of("k", "secret")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff", "it is no text"),
        (b"a\nb", "has control characters"),
    ],
)
def test_a_file_without_a_value_is_refused(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    file = tmp_path / "value"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        read_restrictions([f"health:k=@{file}"], "api")
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ([b"secret"], True),
        ([b"wrong", b"secret"], True),
        ([], False),
        ([b""], False),
        ([b"Secret"], False),
        ([b"secret "], False),
        ([b"secret" * 200_000], False),
        ([b"\xff\x00"], False),
    ],
)
def test_one_of_the_values_must_be_the_same(values: list[bytes], *, allowed: bool) -> None:
    assert Restriction.of("k", "secret").allows(values) is allowed


def test_a_value_that_is_no_unicode_is_compared_byte_by_byte() -> None:
    """The interpreter passes such bytes of the command line on as surrogates."""
    assert read_restrictions(["health:k=\udcfc"], "api")[Area.HEALTH].allows([b"\xfc"])


def test_a_restriction_does_not_show_its_value() -> None:
    assert repr(Restriction.of("k", "secret")) == "Restriction(shown='k')"
