"""Every part of a file in UBJSON is recognised before XGBoost reads it."""

import pytest

from backends.fil.ubjson import is_ubjson, require_whole_ubjson
from tests.backends.fil.conftest import json_of, ubj_of, xgb


def test_whole_files_are_whole() -> None:
    for booster in (xgb("binary:logistic"), xgb("multi:softmax", "classes")):
        assert is_ubjson(ubj_of(booster))
        require_whole_ubjson(ubj_of(booster))
    assert not is_ubjson(json_of(xgb("binary:logistic")))


def test_no_part_of_ubjson_is_whole() -> None:
    data = ubj_of(xgb("binary:logistic"))
    for end in range(2, len(data)):
        with pytest.raises(ValueError, match="do not end within the file"):
            require_whole_ubjson(data[:end])


@pytest.mark.parametrize(
    "data",
    [b"{L", b"{i\xff\xff", b"{i\x01a[$x#i\x01", b"{i\x01a[$d?i\x01", b"{i\x01aS", b"{i\x01aQ"],
)
def test_other_bytes_are_no_ubjson(data: bytes) -> None:
    with pytest.raises(ValueError, match="do not end within the file"):
        require_whole_ubjson(data)
