"""Tests of Ray clusters without Ray: skipped by a name, and failures in CI."""

import os
import subprocess
import sys

import pytest

from tests.serving import ROOT, STOP_SECS

REASON = "needs Ray: run `make test-ray`"
WITHOUT_RAY = "import sys, pytest; sys.modules['ray'] = None; sys.exit(pytest.main(sys.argv[1:]))"
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "ray")


@pytest.mark.parametrize(
    ("in_ci", "status", "outcome"),
    [("true", pytest.ExitCode.TESTS_FAILED, "error"), ("false", pytest.ExitCode.OK, "skipped")],
)
def test_tests_of_ray_clusters_name_what_they_lack_and_fail_without_it_in_ci(
    in_ci: str, status: pytest.ExitCode, outcome: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *OPTIONS, "-rs", "tests/fleet"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "CI": in_ci, "PYTEST_ADDOPTS": ""},
        timeout=STOP_SECS,
    )
    assert done.returncode == status, done.stdout
    assert REASON in done.stdout
    last = done.stdout.splitlines()[-1]
    assert f" {outcome}" in last
    assert "passed" not in last
    assert "failed" not in last
