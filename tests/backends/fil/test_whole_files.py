"""Every part of a file is recognised before a library reads it."""

import pytest

from backends.fil.whole_files import is_ubjson, is_whole_lightgbm, require_whole_ubjson
from tests.backends.fil.conftest import json_of, lgb, text_of, ubj_of, xgb


def test_whole_files_are_whole() -> None:
    for booster in (xgb("binary:logistic"), xgb("multi:softmax", "classes")):
        assert is_ubjson(ubj_of(booster))
        require_whole_ubjson(ubj_of(booster))
    for text in (text_of(lgb("binary")), text_of(lgb("multiclass", "classes"))):
        assert is_whole_lightgbm(text)
    assert not is_ubjson(json_of(xgb("binary:logistic")))


def test_no_part_of_ubjson_is_whole() -> None:
    data = ubj_of(xgb("binary:logistic"))
    for end in range(2, len(data)):
        with pytest.raises(ValueError, match="do not end within the file"):
            require_whole_ubjson(data[:end])


def test_no_text_of_lightgbm_without_some_of_its_trees_is_whole() -> None:
    text = text_of(lgb("binary"))
    trees = text.index(b"end of trees")
    assert not any(is_whole_lightgbm(text[:end]) for end in range(trees))
    assert not any(is_whole_lightgbm(text[:end] + text[trees:]) for end in range(trees))


@pytest.mark.parametrize(
    "data",
    [b"{L", b"{i\xff\xff", b"{i\x01a[$x#i\x01", b"{i\x01a[$d?i\x01", b"{i\x01aS", b"{i\x01aQ"],
)
def test_other_bytes_are_no_ubjson(data: bytes) -> None:
    with pytest.raises(ValueError, match="do not end within the file"):
        require_whole_ubjson(data)
