"""The page and the chart of figures are those of the stored figures."""

import xml.etree.ElementTree as ET

from loadtests.figures.chart import BARS, FULL, chart
from loadtests.figures.claims import CLAIMS
from loadtests.figures.command import CHART, PAGE
from loadtests.figures.page import page
from loadtests.figures.stored import Figures, read
from loadtests.support.results import Line
from tests.loadtests.figures.results_of import compared, saved
from tests.serving import ROOT

SVG = "{http://www.w3.org/2000/svg}"
FAILED = "claim does not hold"


def measured(ours_us: float) -> Figures:
    """The line of a claim: at most 0.5 of Triton's processor time."""
    line = Line("add_sub HTTP", "infer", 8)
    return Figures({}).merged(saved("tensors", compared(ours_us, line=line)), short=False)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_page_and_the_chart_are_those_of_the_stored_figures() -> None:
    figures = read()
    advice = "run: make bench TEST=all ARGS=--from-results"
    assert PAGE.read_text() == page(figures), advice
    assert CHART.read_text() == chart(figures), advice


def test_the_readme_shows_the_chart_and_links_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(loadtests/figures.svg)" in readme
    assert "(loadtests/figures.md)" in readme


def test_a_claim_that_does_not_hold_is_marked_in_words() -> None:
    for figures, count in ((measured(50.0), 0), (measured(51.0), 1)):
        assert texts(chart(figures)).count(FAILED) == count
        assert page(figures).count(f"0.51, at most 0.5: {FAILED}") == count
        assert f"Claims: {1 - count} hold, {count} do not hold" in page(figures)


def test_bars_are_as_long_as_their_figures() -> None:
    tree = ET.fromstring(chart(measured(50.0)))
    bars = {
        each.get("class"): float(each.get("width", ""))
        for each in tree.iter(f"{SVG}rect")
        if each.get("x") == str(BARS)
    }
    assert bars == {"ours": FULL / 2, "peer": FULL}


def test_without_figures_no_claim_is_measured() -> None:
    nothing = Figures({})
    assert f"{len(CLAIMS)} are not measured" in page(nothing)
    assert FAILED not in texts(chart(nothing))
