"""Damage in LightGBM's text of trees is found before the library reads it."""

import re
from typing import Any

import lightgbm
import numpy as np
import pytest

from backends.fil.lightgbm_text import problem_of_lightgbm
from tests.backends.fil.conftest import HOLES, LABELS, ROWS, lgb, text_of

QUIET = {"verbose": -1, "num_threads": 1, "num_leaves": 6, "min_data_in_leaf": 5}
NUMBERS = np.arange(len(ROWS)) % 40
CATEGORIES = np.column_stack([ROWS, NUMBERS])


def train(rows: Any = HOLES, **parameters: Any) -> Any:
    is_categorical = rows is CATEGORIES
    labels = (NUMBERS % 5 == 2) ^ (ROWS[:, 0] > 0.8) if is_categorical else LABELS["binary"]
    categories = [rows.shape[1] - 1] if is_categorical else "auto"
    data = lightgbm.Dataset(rows, labels.astype(int), categorical_feature=categories)
    return lightgbm.train({**QUIET, "objective": "binary", **parameters}, data, 3)


CATEGORICAL = {"min_data_per_group": 5, "cat_smooth": 1, "max_cat_to_onehot": 1}


@pytest.mark.parametrize(
    "booster",
    [
        lgb("binary"),
        lgb("multiclass", "classes"),
        lgb("regression", "values"),
        train(CATEGORIES, **CATEGORICAL),
        train(ROWS, linear_tree=True),
        train(min_data_in_leaf=1000),  # trees of one leaf
        train(boosting="dart"),
        train(boosting="rf", bagging_freq=1, bagging_fraction=0.5),
    ],
)
def test_texts_of_the_library_have_no_problem(booster: Any) -> None:
    text = text_of(booster)
    assert problem_of_lightgbm(text) == ""
    assert problem_of_lightgbm(text.replace(b"tree\n", b"tree\n# \xff\n", 1)) == ""


def test_a_text_without_some_of_its_trees_is_cut_short() -> None:
    text = text_of(lgb("binary"))
    trees = text.index(b"end of trees")
    for end in range(trees):
        assert problem_of_lightgbm(text[:end]).startswith("cut short")
        assert problem_of_lightgbm(text[:end] + text[trees:]).startswith(("cut short", "damaged"))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_leaves", "x", "'num_leaves' that are no whole numbers"),
        ("num_leaves", "", "0 values of 'num_leaves', expected 1"),
        ("num_leaves", "3", "6 values of 'leaf_value', expected 3"),
        ("num_leaves", "0", "'num_leaves' outside of 1 to 2147483648"),
        ("num_cat", "99999999999", "'num_cat' outside of 0 to 2147483648"),
        ("leaf_value", "1 2 3", "3 values of 'leaf_value', expected 6"),
        ("leaf_value", "1 2 3 4 5 x", "'leaf_value' that are no numbers"),
        ("split_feature", "0 1 2 3 6", "'split_feature' outside of 0 to 5"),
        ("split_feature", "0 1 2 3 -1", "'split_feature' outside of 0 to 5"),
        ("decision_type", "2 2 2 2 999", "'decision_type' outside of -128 to 127"),
        ("threshold", "1 1 1 1", "4 values of 'threshold', expected 5"),
        ("threshold", "99 99 99 99 99", "a 'threshold' of another set of categories"),
        ("left_child", "1 2 3 4 5", "'left_child' outside of -6 to 4"),
        ("left_child", "0 1 2 3 4", "'right_child' that does not make a tree"),
        ("cat_boundaries", "0 9 1", "cat_boundaries'"),
        ("cat_threshold", "1", "1 values of 'cat_threshold', expected"),
        ("split_gain", "x", "1 values of 'split_gain', expected 5"),
    ],
)
def test_a_damaged_field_is_named(field: str, value: str, problem: str) -> None:
    text = text_of(train(CATEGORIES, **CATEGORICAL)).decode()
    found = problem_of_lightgbm(damaged(text, field, value))
    assert found.startswith("damaged: tree 0 has ")
    assert problem in found


def test_a_missing_field_is_named() -> None:
    text = text_of(lgb("binary")).decode()
    found = problem_of_lightgbm(damaged(text, "right_child", None))
    assert found == "damaged: tree 0 has 0 values of 'right_child', expected 6"
    assert "max_feature_idx" in problem_of_lightgbm(text.replace("max_fe", "fe").encode())


def damaged(text: str, field: str, value: str | None) -> bytes:
    """The text with another value in its first tree, or without it; `tree_sizes` is right."""
    head, *trees = re.split(
        r"(?=^Tree=\d+$)", text.partition("end of trees")[0], flags=re.MULTILINE
    )
    line = "" if value is None else f"{field}={value}\n"
    trees[0], changed = re.subn(rf"^{field}=.*\n", line, trees[0], count=1, flags=re.MULTILINE)
    assert changed == 1
    sizes = " ".join(str(len(tree)) for tree in trees)
    head = re.sub("tree_sizes=.*", f"tree_sizes={sizes}", head)
    return "".join([head, *trees, "end of trees", text.partition("end of trees")[2]]).encode()
