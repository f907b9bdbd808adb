"""The command `sluice label`: shows and changes the labels of a model of a running server."""

import argparse
import sys
from collections.abc import Mapping
from urllib.parse import quote

from gateway.tools.management import ManagementClient


def run(parsed: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Print the labels after the changes, one a line."""
    client = ManagementClient(parsed.url, environment)
    path = f"/v2/repository/models/{quote(parsed.model, safe='')}/labels"
    if parsed.changes:
        found = client.ask("POST", path, {"labels": dict(parsed.changes)})
    else:
        found = client.ask("GET", path)
    for label, version in found["labels"].items():
        sys.stdout.write(f"{label}={version}\n")
