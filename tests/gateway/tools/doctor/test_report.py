"""The report: every finding is in it, on narrow terminals too."""

import io

import pytest
from rich.console import Console

from gateway.tools.doctor import report
from gateway.tools.doctor.report import Finding, Health, Section, size

PARTS = [
    Section("packages", [Finding("numpy", "[2.0]")]),
    Section("GPUs", [Finding("GPU 0", "no memory " * 9, Health.BROKEN, "nvidia-smi " * 9)]),
]


def shown(columns: int) -> str:
    console = Console(file=io.StringIO(), width=columns)
    console.print(report.table(PARTS))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_nothing_is_cut_off(columns: int) -> None:
    text = shown(columns)
    assert text.count("nvidia-smi") == 9
    assert text.count("memory") == 9
    assert "[2.0]" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


def test_data_has_the_same() -> None:
    data = report.data(PARTS)
    assert data["broken"] is True
    assert data["findings"][0] == {
        "part": "packages",
        "what": "numpy",
        "found": "[2.0]",
        "verdict": "ok",
        "fix": "",
    }


def test_the_summary_counts() -> None:
    assert report.summary(PARTS) == "1 ok, 0 warning, 0 cannot, 1 broken"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1023, "1023 bytes"), (1024, "1 KiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
