"""Rules that no linter knows: sizes, names, and that every public word is documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import Code
from gateway.observability.metrics import DOCUMENTED

ROOT = Path(__file__).parent.parent
LINE_LIMIT = 400
FORBIDDEN_MODULES = {"utils", "util", "common", "misc", "base", "helpers"}
FORBIDDEN_WORDS = re.compile(
    r"\bclass \w*(Manager|Handler|Helper|Processor)\b|class (?!Model)\w*Context\b"
)


def sources() -> list[Path]:
    """Every module of ours, without what is generated."""
    found = [*(ROOT / "gateway").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    return sorted(path for path in found if "protos" not in path.parts)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=named)
def test_a_module_is_short_and_says_what_question_it_answers(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINE_LIMIT
    assert path.stem not in FORBIDDEN_MODULES
    assert not FORBIDDEN_WORDS.search(text)
    if path.name != "__init__.py":
        assert text.startswith('"""')


def test_only_the_gateways_own_init_has_text() -> None:
    filled = [named(path) for path in sources() if path.name == "__init__.py" and path.read_text()]
    assert filled == ["gateway/__init__.py"]


def test_no_module_uses_global_state_or_type_checking_tricks() -> None:
    pattern = re.compile(r"^\s*global \w|TYPE_CHECKING", re.MULTILINE)
    assert [named(path) for path in sources() if pattern.search(path.read_text())] == []


def test_every_option_of_serve_is_documented() -> None:
    documented = (ROOT / "gateway" / "README.md").read_text()
    usage = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", usage)) - {"--help"}
    assert options
    assert [option for option in sorted(options) if f"`{option}`" not in documented] == []


def test_every_metric_is_documented() -> None:
    documented = (ROOT / "gateway" / "README.md").read_text()
    assert [name for name in DOCUMENTED if f"`{name}`" not in documented] == []


def test_every_error_code_is_documented() -> None:
    documented = (ROOT / "gateway" / "README.md").read_text()
    assert [code.name for code in Code if f"`{code.name}`" not in documented] == []
