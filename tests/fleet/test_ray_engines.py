"""An engine with workers on several nodes: vLLM's own code takes the group of its replica."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.nodes import RayNodes
from tests.fleet.spread_replica import BUNDLES, ENGINE_SECS
from tests.serving import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(300)]


def test_the_workers_of_an_engine_are_in_the_bundles_of_its_replica(
    nodes: RayNodes, tmp_path: Path
) -> None:
    nodes.add("b")
    file = tmp_path / "record"
    found = subprocess.run(
        [sys.executable, "-m", "tests.fleet.spread_replica", str(file)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        timeout=2 * ENGINE_SECS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.exists(), found.stderr
    record = json.loads(file.read_text())
    assert record["bundles"] == list(BUNDLES)
    assert len(set(record["nodes"])) == 2
