"""Tests of Azure without Node or azurite: skipped by a name, and failures in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.e2e.object_storage import clouds
from tests.serving import ROOT, STOP_SECS

OF_AZURE = "test_bad_storage.py::test_a_wrong_key_of_azure_is_named"
OUTCOMES = {True: pytest.fail.Exception, False: pytest.skip.Exception}
"""The end of a test of Azure, by whether it runs in CI."""


@pytest.mark.parametrize("in_ci", [True, False])
@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("node", "needs node: apt-get install nodejs npm"),
        ("azurite", "needs azurite: run `npm ci --prefix tests/e2e/object_storage/azurite/none`"),
    ],
)
def test_what_azure_lacks_skips_its_tests_and_fails_them_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, reason: str, *, in_ci: bool
) -> None:
    if lacks == "azurite":
        (tmp_path / "node").touch(mode=0o755)
        monkeypatch.setattr(clouds, "AZURITE", clouds.AZURITE / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(needs, "IN_CI", in_ci)
    with pytest.raises(tuple(OUTCOMES.values())) as ended, clouds.azure():
        pass
    assert (ended.type, ended.value.msg) == (OUTCOMES[in_ci], reason)


def test_a_run_in_ci_without_node_fails() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment = {**os.environ, "CI": "true", "PATH": "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, f"{Path(__file__).parent}/{OF_AZURE}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
        timeout=STOP_SECS,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "needs node: apt-get install nodejs npm" in done.stdout
    assert "skipped" not in done.stdout
