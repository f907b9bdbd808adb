"""The command `sluice ps`: the models in the memory of a running server."""

import argparse
import http.client
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gateway.models.residence import amount

PATH = "/v2/memory"
LIMIT_SECS = 10.0
COLUMNS = ("model", "version", "state", "residency", "memory", "requests", "idle", "load")


class Unanswered(Exception):
    """A server that does not describe its memory; the message is one line."""


def run(parsed: argparse.Namespace, console: Console) -> None:
    """Write the table, or the JSON of the server, to stdout."""
    found = read(parsed.url)
    if parsed.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    console.print(table(found))


def read(url: SplitResult) -> Mapping[str, Any]:
    """The description of a server's memory; raises if it has none."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    try:
        with closing(kind(url.hostname or "", url.port, timeout=LIMIT_SECS)) as connection:
            connection.request("GET", PATH)
            response = connection.getresponse()
            body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unanswered(f"{url.geturl()} does not answer: {error}") from None
    try:
        found: Mapping[str, Any] = json.loads(body)
    except ValueError:
        found = {}
    if response.status != HTTPStatus.OK or "models" not in found:
        reason = found.get("error") or f"status {response.status}"
        raise Unanswered(f"{url.geturl()} does not describe its memory: {reason}")
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
