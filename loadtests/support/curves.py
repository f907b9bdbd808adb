"""Curves over time as an SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, PANEL_HEIGHT = 900, 170
LEFT, RIGHT, TOP, BETWEEN = 70, 40, 50, 50
INK, CURVE, GRID = "#333", "#1f77b4", "#ddd"
TICKS, LEAST_WHOLE = 4, 10.0
"""Ticks, and the largest value from which on they are whole numbers."""
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity: its name with the unit, and a value for each time; drawn from zero."""

    name: str
    values: Sequence[float]


def draw(path: Path, title: str, secs: Sequence[float], panels: Sequence[Panel]) -> None:
    """Write the panels below each other; `secs` are the times of their values."""
    height = TOP + len(panels) * (PANEL_HEIGHT + BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, secs, TOP + number * (PANEL_HEIGHT + BETWEEN))
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _panel(panel: Panel, secs: Sequence[float], top: float) -> Sequence[str]:
    last, highest = max(secs, default=0) or 1.0, max(panel.values, default=0) * 1.1 or 1.0
    digits = 0 if highest >= LEAST_WHOLE else 1

    def x(at: float) -> float:
        return LEFT + at / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + PANEL_HEIGHT * (1 - value / highest)

    parts = [f'<text x="{LEFT}" y="{top - 6:.0f}">{escape(panel.name)}</text>']
    for tick in range(TICKS + 1):
        value, at = highest * tick / TICKS, last * tick / TICKS
        shown = f"{value / MILLION:,.1f} M" if highest >= MILLION else f"{value:,.{digits}f}"
        parts += [
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>',
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{shown}</text>',
            f'<text x="{x(at):.1f}" y="{top + PANEL_HEIGHT + 16}" text-anchor="middle">'
            f"{at / 60:.1f} min</text>",
        ]
    points = " ".join(f"{x(a):.1f},{y(v):.1f}" for a, v in zip(secs, panel.values, strict=True))
    return [*parts, f'<polyline points="{points}" fill="none" stroke="{CURVE}"/>']
