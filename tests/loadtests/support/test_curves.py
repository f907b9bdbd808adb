"""Curves as an SVG: well-formed, and each value where it belongs."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loadtests.support.curves import Panel, draw

SVG = "{http://www.w3.org/2000/svg}"


def points(path: Path) -> list[list[tuple[float, float]]]:
    lines = [line.get("points", "") for line in ET.parse(path).iter(f"{SVG}polyline")]
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.split())]
        for line in lines
    ]


def test_each_panel_has_a_curve_with_a_point_for_each_value(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    draw(path, "a < b & c", [0, 5, 10], [Panel("one", [1, 2, 3]), Panel("other", [9, 9, 9])])
    rising, flat = points(path)
    assert [x for x, _ in rising] == [x for x, _ in flat]
    assert rising[0][0] < rising[1][0] < rising[2][0]
    assert rising[0][1] > rising[1][1] > rising[2][1]
    assert len({y for _, y in flat}) == 1
    assert min(y for _, y in flat) > max(y for _, y in rising)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_there_may_be_nothing_to_draw(tmp_path: Path, values: list[float]) -> None:
    path = tmp_path / "curves.svg"
    draw(path, "nothing", [0.0] * len(values), [Panel("nothing", values)])
    assert [len(line) for line in points(path)] == [len(values)]
