"""The command `sluice ps`: the models in the memory of a running server."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gateway.errors import Code, InferenceError
from gateway.models.residence import amount
from gateway.tools.management import ManagementClient

PATH = "/v2/memory"
COLUMNS = ("model", "version", "state", "residency", "memory", "requests", "idle", "load")


def run(parsed: argparse.Namespace, environment: Mapping[str, str], console: Console) -> None:
    """Write the table, or the JSON of the server, to stdout."""
    found = read(ManagementClient(parsed.url, environment))
    if parsed.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    console.print(table(found))


def read(client: ManagementClient) -> Mapping[str, Any]:
    """The description of a server's memory; InferenceError if it has none."""
    reason = "its answer is none of Sluice"
    try:
        found = client.ask("GET", PATH)
    except InferenceError as error:
        reason, found = error.message, None
    if not isinstance(found, dict) or "models" not in found:
        raise InferenceError(Code.UNKNOWN, f"the server does not describe its memory: {reason}")
    return found


def table(found: Mapping[str, Any]) -> Table:
    """A row for each version, and the budget below."""
    budget = ", ".join(f"{place}: {amount(place, most)}" for place, most in found["budget"].items())
    made = Table(
        *(Column(name, overflow="fold") for name in COLUMNS), caption=f"budget: {budget or 'none'}"
    )
    for row in found["models"]:
        sizes = ", ".join(f"{amount(place, n)} {place}" for place, n in row["memory"].items())
        cells = (row["name"], row["version"], row["state"], row["residency"], sizes)
        numbers = (str(row["requests"]), f"{row['idle_secs']:.0f} s", f"{row['load_secs']:.1f} s")
        made.add_row(*map(Text, (*cells, *numbers)))
    return made
