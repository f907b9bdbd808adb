"""The Helm chart, and the command that renders it."""

import subprocess
from pathlib import Path

from tests.deploy import wheels
from tests.serving import ROOT

CHART = ROOT / "deploy" / "helm" / "sluice"


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run `helm`."""
    command = [wheels.helm(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
