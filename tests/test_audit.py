"""`make audit`: findings of pip-audit fail, and a service without an answer is reported."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ROOT

LOCK = """# A head, with one==9 in it.
torch==2.13.0+cpu

one==1.0 ; python_full_version < '3.11.3' \\
    --hash=sha256:00
two==2.0 \\
    --hash=sha256:00
"""
VULNERABILITY = {"id": "CVE-1", "fix_versions": ["2.1", "3.0"]}
FOUND = {"name": "two", "version": "2.0", "vulns": [VULNERABILITY]}
FINE = {"name": "one", "version": "1.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}

Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """Audits locks by a stand-in for pip-audit, which reports packages or fails with an error."""
    main = runpy.run_path(str(ROOT / ".ci/audit.py"))["main"]

    def run(*packages: Any, error: str = "", locks: tuple[str, ...] = (LOCK,)) -> tuple[int, str]:
        program = tmp_path / "pip-audit"
        (tmp_path / "report").write_text(json.dumps({"dependencies": packages}))
        (tmp_path / "error").write_text(error)
        made = f'cp {tmp_path}/report "${{5#--output=}}"'
        keep = f'cat "${{6#--requirement=}}" >> {tmp_path}/asked; echo >> {tmp_path}/asked'
        end = f"cat {tmp_path}/error >&2; exit 1" if error else made
        program.write_text(f"#!/bin/sh\n{keep}\n{end}\n")
        program.chmod(0o755)
        for number, text in enumerate(locks):
            (tmp_path / f"lock{number}").write_text(text)
        files = [str(tmp_path / f"lock{number}") for number in range(len(locks))]
        status = main([str(program), *files])
        return status, capsys.readouterr().out

    return run


def test_a_vulnerability_fails_with_the_releases_that_have_it_no_longer(audit: Audit) -> None:
    assert audit(FINE, FOUND, UNKNOWN) == (
        1,
        "audit: two==2.0 has CVE-1, fixed in 2.1, 3.0\n"
        "audit: 2 versions audited, 1 with vulnerabilities\n"
        "audit: 1 versions unknown: torch\n",
    )


def test_no_vulnerability_succeeds(audit: Audit) -> None:
    assert audit(FINE) == (0, "audit: 1 versions audited, 0 with vulnerabilities\n")


def test_a_service_that_knows_no_version_has_audited_none(audit: Audit) -> None:
    text = "audit: the advisory service knows none of 1 versions: none is audited\n"
    assert audit(UNKNOWN) == (0, text)


def test_a_service_that_cannot_be_reached_is_reported(audit: Audit) -> None:
    text = "audit: the advisory service cannot be reached: none of 3 versions is audited\n"
    assert audit(error="requests.exceptions.ConnectionError: no route") == (0, text)


def test_another_failure_of_the_program_fails(audit: Audit) -> None:
    found = audit(error="ERROR:pip_audit._cli: duplicate requirements")
    assert found == (1, "audit: pip-audit failed (see above)\n")


def test_the_versions_of_all_locks_are_audited_each_once(audit: Audit, tmp_path: Path) -> None:
    audit(FINE, locks=(LOCK, LOCK, "one==1.1\n"))
    asked = (tmp_path / "asked").read_text().split()
    assert sorted(asked) == ["one==1.0", "one==1.1", "torch==2.13.0", "two==2.0"]
