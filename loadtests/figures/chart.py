"""The chart of the claims: both sides' processor time as bars, each claim in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from loadtests.figures.claims import CLAIMED, CLAIMS, GROUPS, TRITON, VLLM, Claim
from loadtests.figures.stored import Figures, StoredLine, Verdict, shown
from loadtests.support.results import PROCESSOR_TIME, RATE, describe

WIDTH, MARGIN, ROW, HEADING, HEAD = 1000, 16, 26, 38, 74
BARS, FULL, MOST = 240, 160, 1.25
"""The left end of the bars; the length of the peer's bar; the longest bar, over the peer's."""
VALUES, BOUNDS, RATES, END = 466, 604, 728, WIDTH - MARGIN
BAR = 8
NAMES: Mapping[str, str] = {TRITON: "Triton", VLLM: "vLLM's own server"}
STYLE = """
text { fill: #1f2328; font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.card { fill: #ffffff; stroke: #d1d9e0; }
.title { font-size: 15px; font-weight: 600; }
.group { font-weight: 600; }
.quiet { fill: #59636e; font-size: 11px; }
.small { font-size: 11px; }
.peer { fill: #afb8c1; }
.ours { fill: #0969da; }
.bound { stroke: #1f2328; stroke-width: 2; }
.rule { stroke: #d1d9e0; }
.fails { fill: #cf222e; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .card { fill: #0d1117; stroke: #3d444d; }
  .quiet { fill: #9198a1; }
  .peer { fill: #656c76; }
  .ours { fill: #4493f8; }
  .bound { stroke: #e6edf3; }
  .rule { stroke: #3d444d; }
  .fails { fill: #ff7b72; }
}
"""


@dataclass(frozen=True, slots=True)
class Bars:
    """A row: the figure that is drawn, and the claims about it and about the rate."""

    test: str
    line: str
    figure: str
    claims: Sequence[Claim]

    @property
    def label(self) -> str:
        """The line; with the figure unless it is processor time."""
        is_time = self.figure.startswith(PROCESSOR_TIME)
        return self.line if is_time else f"{self.line}: {self.figure}"


def rows() -> Sequence[Bars]:
    """The rows of all claims: one for each line, and each figure of it that is no rate."""
    claims: dict[tuple[str, str, str], list[Claim]] = {}
    for claim in CLAIMS:
        figure = PROCESSOR_TIME if claim.bound.figure == RATE else claim.bound.figure
        claims.setdefault((claim.test, claim.line, figure), []).append(claim)
    return [Bars(*key, found) for key, found in claims.items()]


def chart(figures: Figures) -> str:
    """The SVG, with a background for light pages and one for dark pages."""
    by_test: dict[str, list[Bars]] = {}
    for each in rows():
        by_test.setdefault(each.test, []).append(each)
    body, top = [], float(HEAD)
    for test in (each for each in GROUPS if each in by_test):
        body += _heading(test, figures, top)
        top += HEADING
        for each in by_test[test]:
            body += _row(each, figures, top)
            top += ROW
    height = top + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
        f' width="{WIDTH}" height="{height:g}" role="img">',
        f"<title>Claims of Sluice, and what was found</title><style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6"/>',
        *_legend(figures),
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{style}{end}>{escape(text)}</text>'


def _bar(kind: str, y: float, share: float) -> str:
    """A bar; one beyond the longest ends in an arrow."""
    length = FULL * min(share, MOST)
    bar = f'<rect class="{kind}" x="{BARS}" y="{y:g}" width="{length:.1f}" height="{BAR}"/>'
    if share <= MOST:
        return bar
    tip = f"M{BARS + length:.1f} {y - 2:g}l{BAR} {BAR / 2 + 2:g}l-{BAR} {BAR / 2 + 2:g}z"
    return f'{bar}<path class="{kind}" d="{tip}"/>'


def _legend(figures: Figures) -> Iterator[str]:
    yield _text(MARGIN, 26, "Processor time of a unit of work: less is better", "title")
    yield f'<rect class="ours" x="{MARGIN}" y="41" width="18" height="{BAR}"/>'
    yield _text(MARGIN + 24, 49, "Sluice", "small")
    yield f'<rect class="peer" x="86" y="41" width="18" height="{BAR}"/>'
    yield _text(110, 49, "the peer, in full length", "small")
    yield '<path class="bound" d="M248 38v14"/>'
    yield _text(256, 49, "the bound of the claim", "small")
    machines = dict.fromkeys(describe(line.run["machine"]) for line in figures.lines.values())
    yield _text(END, 26, "; ".join(machines), "quiet", "end")
    yield _text(VALUES, 64, "Sluice and peer", "quiet")
    yield _text(BOUNDS, 64, "ratio, or figure", "quiet")
    yield _text(RATES, 64, "rate", "quiet")


def _heading(test: str, figures: Figures, top: float) -> Iterator[str]:
    lines = figures.of_test(test)
    peers = dict.fromkeys(line.peer for line in lines if line.peer)
    title = GROUPS[test].title + (
        f" (peer: {NAMES.get(peer, peer)})" if (peer := next(iter(peers), "")) else ""
    )
    yield f'<path class="rule" d="M{MARGIN} {top + 8:g}H{END}"/>'
    yield _text(MARGIN, top + 28, title, "group")
    days = dict.fromkeys(line.measured for line in lines)
    yield _text(END, top + 28, "; ".join(days), "quiet", "end")


def _row(row: Bars, figures: Figures, top: float) -> Iterator[str]:
    middle = top + ROW / 2 + 4
    yield _text(MARGIN, middle, row.label)
    line = figures.lines.get((row.test, row.line))
    verdicts = [figures.verdict(each) for each in row.claims]
    if line is None or all(each.found is None for each in verdicts):
        yield _text(BARS, middle, "not measured", "quiet")
        return
    yield from _bars(row, line, top)
    yield from _verdicts(verdicts, middle)


def _bars(row: Bars, line: StoredLine, top: float) -> Iterator[str]:
    """Both bars, or one over its bound; the bound; and the figures."""
    ours, peer = line.median(row.figure, CLAIMED), line.median(row.figure, line.peer)
    bound = next((each.bound.limit for each in row.claims if each.bound.figure == row.figure), None)
    full = peer or bound
    if ours is None or not full:
        return
    share = line.ratio(row.figure, CLAIMED) if peer else ours / full
    yield _bar("ours", top + (4 if peer else 9), share or 0.0)
    if peer:
        yield _bar("peer", top + 14, 1)
    if bound is not None:
        x = BARS + FULL * (bound if peer else 1)
        yield f'<path class="bound" d="M{x:.1f} {top + 2:g}v22"/>'
    values = shown(ours) + (f" and {shown(peer)}" if peer else "")
    yield _text(VALUES, top + ROW / 2 + 4, f"{values} {line.unit(row.figure)}", "small")


def _verdicts(verdicts: Sequence[Verdict], y: float) -> Iterator[str]:
    """Each claim in its column, and words at the end of the row if one does not hold."""
    for each in verdicts:
        x = RATES if each.bound.figure == RATE else BOUNDS
        found = "not measured" if each.found is None else shown(each.found)
        yield _text(x, y, f"{found}, {each.bound}", "small fails" if each.fails else "small")
    if any(each.fails for each in verdicts):
        yield _text(END, y, "claim does not hold", "small fails", "end")
