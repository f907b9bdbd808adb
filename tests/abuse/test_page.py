"""The page of attacks and faults: each case names tests that exist, or a reason."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.abuse.test_abuse import CASES
from tests.serving import ROOT

PAGE = Path(__file__).parent / "README.md"
ROW = re.compile(r"\| (\d+) \| (.+) \| (.+) \| (.+) \|")
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
NO_TEST = re.compile(r"no test: \w.{10,}")
CASE_COUNT = 74


@cache
def rows() -> dict[int, str]:
    """The tests of each case, as the page has them."""
    found = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines()]
    return {int(each[1]): each[4] for each in found if each is not None}


@cache
def functions(file: str) -> frozenset[str]:
    """The functions of a module of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_each_case_has_a_row() -> None:
    assert list(rows()) == list(range(1, CASE_COUNT + 1))


@pytest.mark.parametrize("number", range(1, CASE_COUNT + 1))
def test_a_case_names_tests_that_exist_or_a_reason(number: int) -> None:
    named = TEST.findall(rows()[number])
    assert named or NO_TEST.fullmatch(rows()[number])
    assert [(file, name) for file, name in named if name not in functions(file)] == []


def test_each_act_is_a_row_of_its_case() -> None:
    acts = {(each.number, each.act.__module__, each.act.__name__) for each in CASES}
    named = {
        (number, f"tests.{file.removesuffix('.py').replace('/', '.')}", name)
        for number, cell in rows().items()
        for file, name in TEST.findall(cell)
        if file.startswith("abuse/") and not name.startswith("test_")
    }
    assert acts == named
