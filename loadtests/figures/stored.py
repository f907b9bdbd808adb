"""Stored figures: the last ones of each line, with the run that measured them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loadtests.figures.claims import CLAIMED, CLAIMS, GROUPS, Bound, Claim
from loadtests.support.results import Better, ratio

FOLDER = Path(__file__).parents[1]
STORED = FOLDER / "figures.json"
DIGITS = 5


@dataclass(frozen=True, slots=True)
class StoredLine:
    """The last figures of a line: by their names, with the values of each side.

    The run has the date, the machine, and whether it was short.
    """

    test: str
    name: str
    figures: Mapping[str, Mapping[str, Any]]
    run: Mapping[str, Any]

    @property
    def sides(self) -> Sequence[str]:
        """The names of the sides, in the order of the run."""
        return list(dict.fromkeys(side for each in self.figures.values() for side in each["sides"]))

    @property
    def peer(self) -> str:
        """The side that ratios are over; "" for none."""
        return next((peer for peer in GROUPS[self.test].peers if peer in self.sides), "")

    @property
    def rounds(self) -> int:
        """The most rounds of a figure."""
        return max(
            len(found["rounds"])
            for each in self.figures.values()
            for found in each["sides"].values()
        )

    @property
    def measured(self) -> str:
        """The date, and the number of rounds."""
        kind = "short round" if self.run["short"] else "round"
        return f"{self.run['date'][:10]}, {self.rounds} {kind}{'s' if self.rounds > 1 else ''}"

    def median(self, figure: str, side: str) -> float | None:
        """A figure of a side."""
        found = self.figures.get(figure, {"sides": {}})["sides"].get(side)
        return None if found is None else float(found["median"])

    def spread(self, figure: str, side: str) -> float | None:
        """The spread of a figure, if it has more than one round."""
        found = self.figures.get(figure, {"sides": {}})["sides"].get(side)
        return None if found is None else found["spread"]

    def unit(self, figure: str) -> str:
        """The unit of a figure."""
        return str(self.figures[figure]["unit"])

    def ratio(self, figure: str, side: str) -> float | None:
        """A figure of a side over the peer's, in two decimals; claims are judged by these."""
        sides = self.figures.get(figure, {"sides": {}})["sides"]
        if side == self.peer or side not in sides or self.peer not in sides:
            return None
        found = ratio(sides[side]["rounds"], sides[self.peer]["rounds"])
        return None if found is None else round(found, 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, and what was found; None if it was not measured."""

    bound: Bound
    found: float | None

    @property
    def fails(self) -> bool:
        """It was measured, and does not hold."""
        return self.found is not None and not self.bound.holds(self.found)

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.bound.figure} {self.bound}: not measured"
        end = "claim does not hold" if self.fails else "holds"
        return f"{self.bound.figure} {shown(self.found)}, {self.bound}: {end}"


def shown(value: float) -> str:
    """A value or a ratio, with three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Figures:
    """The last figures of each line, by its test and name."""

    lines: Mapping[Key, StoredLine]

    def of_test(self, test: str) -> Sequence[StoredLine]:
        """The lines of a load test."""
        return [line for line in self.lines.values() if line.test == test]

    def verdict(self, claim: Claim) -> Verdict:
        """A claim, judged by the last figures; a peer that is missing leaves it unmeasured."""
        line = self.lines.get((claim.test, claim.line))
        if line is None:
            return Verdict(claim.bound, None)
        is_ratio = bool(GROUPS[claim.test].peers)
        find = line.ratio if is_ratio else line.median
        return Verdict(claim.bound, find(claim.bound.figure, CLAIMED))

    def verdicts(self, test: str, line: str) -> Sequence[Verdict]:
        """The verdicts of the claims about a line."""
        return [self.verdict(each) for each in CLAIMS if (each.test, each.line) == (test, line)]

    def merged(self, result: Mapping[str, Any], *, short: bool) -> "Figures":
        """These figures, with those that a load test has saved in the place of earlier ones."""
        run = {
            "date": result["date"],
            "short": short,
            "machine": {
                name: value for name, value in result["machine"].items() if name != "load_average"
            },
        }
        test, lines = result["test"], dict(self.lines)
        for each in result["lines"]:
            line = StoredLine(test, each["line"], _compact(each["figures"]), run)
            if _replaces(line, lines.get((test, line.name))):
                lines[test, line.name] = line
        return Figures(lines)

    def dump(self) -> bytes:
        """The file."""
        runs: list[Mapping[str, Any]] = []
        for line in self.lines.values():
            if line.run not in runs:
                runs.append(line.run)
        lines = [
            {
                "test": line.test,
                "line": line.name,
                "run": runs.index(line.run),
                "figures": line.figures,
            }
            for line in self.lines.values()
        ]
        return b"".join(_dumped({"runs": runs, "lines": lines}))


def _replaces(line: StoredLine, before: StoredLine | None) -> bool:
    """A later run replaces an earlier one; a short run replaces short ones only."""
    if before is None:
        return True
    return before.run["date"] <= line.run["date"] and line.run["short"] <= before.run["short"]


def _dumped(content: Mapping[str, Sequence[Any]]) -> Iterator[bytes]:
    """JSON with a line of text for each run and each line, which keeps differences short."""
    for number, (name, rows) in enumerate(content.items()):
        yield (b"{" if number == 0 else b",") + f'\n"{name}": [\n'.encode()
        yield b",\n".join(map(orjson.dumps, rows))
        yield b"\n]"
    yield b"\n}\n"


def parse(text: bytes) -> Figures:
    """The figures of a file."""
    content = orjson.loads(text)
    runs = content["runs"]
    lines = (
        StoredLine(each["test"], each["line"], each["figures"], runs[each["run"]])
        for each in content["lines"]
    )
    return Figures({(line.test, line.name): line for line in lines})


def read() -> Figures:
    """The stored figures; none without the file."""
    return parse(STORED.read_bytes()) if STORED.exists() else Figures({})


def _compact(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures that have a better value, in few digits."""
    return {
        name: {
            "unit": each["unit"],
            "better": each["better"],
            "sides": {side: _rounded(found) for side, found in each["sides"].items()},
        }
        for name, each in figures.items()
        if each["better"] != Better.NEITHER.value
    }


def _rounded(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "median": _round(found["median"]),
        "spread": None if found["spread"] is None else _round(found["spread"]),
        "rounds": [_round(value) for value in found["rounds"]],
    }


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
