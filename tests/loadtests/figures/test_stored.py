"""Stored figures: the last ones of each line, and the verdicts of claims by them."""

import pytest

from loadtests.figures.claims import CLAIMS, GROUPS, RUNS, Claim, at_least, at_most
from loadtests.figures.stored import Figures, parse, read
from loadtests.support.results import PROCESSOR_TIME, RATE, Line, Results
from tests.loadtests.figures.results_of import ADD_SUB, compared, saved

NONE = Figures({})
KEY = ("tensors", str(ADD_SUB))
LATER = "2026-11-27 10:00:00"


def test_figures_survive_their_file_without_loss() -> None:
    figures = NONE.merged(saved("tensors", compared(50.0)), short=True)
    assert parse(figures.dump()) == figures
    line = figures.lines[KEY]
    assert (line.sides, line.peer) == (["triton", "gateway"], "triton")
    assert line.ratio(PROCESSOR_TIME, "gateway") == 0.5
    assert line.ratio(RATE, "gateway") == 2.0
    assert line.measured == "2026-11-26, 2 short rounds"


def test_a_line_that_is_not_measured_keeps_its_figures_and_its_date() -> None:
    first = NONE.merged(saved("tensors", compared(50.0)), short=False)
    other = Line("add_sub gRPC", "infer", 8)
    second = first.merged(saved("tensors", compared(60.0, line=other), LATER), short=False)
    assert second.lines[KEY] == first.lines[KEY]
    assert second.lines["tensors", str(other)].measured == "2026-11-27, 2 rounds"


@pytest.mark.parametrize(
    ("first", "first_is_short", "second", "second_is_short", "expected"),
    [
        ("2026-11-26 10:00:00", False, LATER, False, 60.0),
        ("2026-11-26 10:00:00", True, LATER, False, 60.0),
        (LATER, False, "2026-11-26 10:00:00", False, 50.0),
        ("2026-11-26 10:00:00", False, LATER, True, 50.0),
    ],
    ids=["later", "complete", "earlier", "short"],
)
def test_figures_are_replaced_by_later_ones_that_are_not_worse(
    first: str, first_is_short: bool, second: str, second_is_short: bool, expected: float
) -> None:
    figures = NONE.merged(saved("tensors", compared(50.0), first), short=first_is_short)
    figures = figures.merged(saved("tensors", compared(60.0), second), short=second_is_short)
    assert figures.lines[KEY].median(PROCESSOR_TIME, "gateway") == expected


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (at_most(PROCESSOR_TIME, 0.5), "processor time 0.5, at most 0.5: holds"),
        (at_most(PROCESSOR_TIME, 0.49), "processor time 0.5, at most 0.49: claim does not hold"),
        (at_least(RATE, 2), "rate 2, at least 2: holds"),
        (at_least(RATE, 2.1), "rate 2, at least 2.1: claim does not hold"),
        (at_most("memory", 1), "memory at most 1: not measured"),
    ],
)
def test_a_claim_is_judged_at_its_bound(bound: object, words: str) -> None:
    figures = NONE.merged(saved("tensors", compared(50.0)), short=False)
    assert str(figures.verdict(Claim("tensors", str(ADD_SUB), bound))) == words


def test_a_claim_without_its_peer_is_not_measured() -> None:
    alone = Results()
    alone.add("gateway", ADD_SUB.costs(1.0, 1.0))
    figures = NONE.merged(saved("tensors", alone), short=False)
    claim = Claim("tensors", str(ADD_SUB), at_most(PROCESSOR_TIME, 100))
    assert figures.verdict(claim).found is None


def test_a_claim_of_a_group_without_a_peer_is_about_the_figure_itself() -> None:
    line, results = Line("start with identity", "start"), Results()
    results.add("gateway", {line.lower("memory", "MiB"): 61.0})
    figures = NONE.merged(saved("start", results), short=False)
    assert figures.verdict(Claim("start", str(line), at_most("memory", 60))).fails


def test_every_claim_is_about_a_figure_that_is_stored() -> None:
    figures = read()
    unknown = [claim for claim in CLAIMS if figures.verdict(claim).found is None]
    assert unknown == []


def test_every_run_and_every_claim_has_a_group_on_the_page() -> None:
    assert {run.test for run in RUNS} == set(GROUPS)
    assert {claim.test for claim in CLAIMS} <= set(GROUPS)
