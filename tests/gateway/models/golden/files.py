"""Golden requests of tests."""

import json
from pathlib import Path
from typing import Any

TEXT_INPUT: dict[str, Any] = {"name": "text_input", "shape": [1]}
CAPITAL: dict[str, Any] = {
    "request": {"text": "Capital of France?"},
    "expect": {"text": {"matches": "(?i)paris"}},
}


def write_golden(folder: Path, name: str, content: Any) -> None:
    """Add a golden request to the folder of a model."""
    (folder / "golden").mkdir(exist_ok=True)
    (folder / "golden" / f"{name}.json").write_text(json.dumps(content))
