"""`sluice check --golden` loads models without a server, and has a row for each golden request."""

from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.models.golden_results import GoldenOutcome
from gateway.tools.golden import check_golden
from tests.conformance.models import identity
from tests.gateway.models.golden.files import write_golden
from tests.serving import write_model

PASSED, FAILED, SKIPPED = GoldenOutcome.PASSED, GoldenOutcome.FAILED, GoldenOutcome.SKIPPED


def golden(text: str, **checks: Any) -> dict[str, Any]:
    """A request to a model that answers with its own text."""
    return {"request": {"text": text}, "expect": {"text": checks}, "why": f"about {text}"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that answers, one that fails to load, and one without golden requests."""
    write_model(tmp_path, "good", identity("BYTES", "1"))
    write_golden(tmp_path / "good", "capital", golden("Paris", equals="Paris"))
    write_model(tmp_path, "other", 'backend: "no_backend_of_that_name"')
    return tmp_path


def test_each_golden_request_has_a_row_with_its_outcome(repository: Path) -> None:
    good = repository / "good"
    write_golden(good, "city", golden("Lyon", prefix="Paris"))
    write_golden(good, "near", golden("Lyon", similar={"to": "Paris", "model": "embed"}))
    far = golden("Rome", equals="Oslo")
    far["expect"]["outputs"] = {"OUTPUT": {"similar": {"to": "x", "model": "embed"}}}
    write_golden(good, "far", far)
    write_model(repository, "broken", 'backend: "no_backend_of_that_name"')
    (repository / "broken" / "golden").mkdir()
    write_model(repository, "unread", identity("BYTES", "1"))
    write_golden(repository / "unread", "g", {})
    rows = check_golden(repository, repository / "store", "")
    assert [(row.model, row.version, row.result.name, row.result.outcome) for row in rows] == [
        ("broken", "1", "", FAILED),
        ("good", "1", "capital", PASSED),
        ("good", "1", "city", FAILED),
        ("good", "1", "far", FAILED),
        ("good", "1", "near", SKIPPED),
        ("unread", "1", "", FAILED),
    ]
    reasons = [row.result.reason for row in rows]
    assert "no_backend_of_that_name" in reasons[0]
    assert reasons[1] == ""
    assert reasons[2] == "text does not begin with 'Paris': 'Lyon'"
    assert reasons[3] == "text is not 'Oslo': 'Rome'"
    assert reasons[4].startswith("model 'embed' is not loaded")
    assert reasons[5] == "golden request 'g': request: is missing"


def test_the_command_shows_a_table_and_fails_if_a_request_fails(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "--golden", str(repository)])
    shown = capsys.readouterr().out
    assert "capital" in shown
    assert "passed" in shown
    assert "about Paris" in shown
    write_golden(repository / "good", "city", golden("Lyon", equals="Paris"))
    with pytest.raises(SystemExit) as caught:
        main(["check", "--golden", str(repository)])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert "failed" in printed.out
    assert "1 of 2 golden requests failed" in printed.err


def test_a_repository_without_golden_requests_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, "other", 'backend: "no_backend_of_that_name"')
    main(["check", "--golden", str(tmp_path)])
    assert "no_backend_of_that_name" not in capsys.readouterr().out
