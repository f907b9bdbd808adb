"""Results of load tests, as their files have them."""

from collections.abc import Mapping
from typing import Any

from loadtests.support.results import Line, Results

MACHINE = {
    "cpu": "A CPU",
    "cpus": 2,
    "load_average": 0.5,
    "kernel": "6",
    "python": "3.11.2",
    "optimized": True,
    "packages": {"sluice": "1"},
}
ADD_SUB = Line("add_sub HTTP", "infer", 8)


def saved(test: str, results: Results, date: str = "2026-11-26 10:00:00") -> Mapping[str, Any]:
    """The content of a file of results."""
    return {"test": test, "date": date, "machine": MACHINE, "lines": results.as_lines()}


def compared(ours_us: float, rate: float = 2.0, line: Line = ADD_SUB) -> Results:
    """Two rounds of Triton at 100 us and one unit per second, and of the gateway."""
    results = Results()
    for _ in range(2):
        results.add("triton", line.costs(1.0, 100.0))
        results.add("gateway", line.costs(rate, ours_us))
    return results
