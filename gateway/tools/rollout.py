"""The command `sluice rollout`: shows and changes the rollouts of running servers."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gateway.errors import Code, InferenceError
from gateway.flags.values import DEFAULT_URL, url
from gateway.rollouts.guardrails import read_duration
from gateway.rollouts.plan import read_step
from gateway.rollouts.rollout import OPEN, RolloutState
from gateway.tools.management import ManagementClient

POLL_SECS = 1.0
"""Time between two looks at a server."""
EXIT_STATUS = {RolloutState.PROMOTED: 0, RolloutState.PAUSED: 3}
EXIT_NOT_PROMOTED, EXIT_NOT_IN_TIME = 4, 5
ROLLOUT = ("model", "versions", "state", "weight", "step", "time", "requests")
GUARDRAIL = ("model", "guardrail", "evidence", "new version", "stable")
HISTORY = ("time", "state", "step", "weight", "by", "reason")
"""The columns of the tables."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutServer:
    """A server whose rollouts are shown or changed."""

    place: str
    client: ManagementClient

    def rollouts(self, model: str | None) -> list[Row]:
        """The latest rollouts, of one model or of all."""
        if model is None:
            found: list[Row] = self.client.ask("GET", "/v2/rollouts")
            return found
        return [self.client.ask("GET", _path(model))]


def run(parsed: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    """Carry out one action at each server; returns the exit status."""
    servers = [
        RolloutServer(each.geturl(), ManagementClient(each, environment))
        for each in parsed.url or [url(DEFAULT_URL)]
    ]
    if parsed.action == "wait":
        return _wait(parsed, servers, console)
    if parsed.action == "history":
        _show_histories(parsed, servers, console)
    elif parsed.action != "status":
        members = _members(parsed)
        path = f"{_path(parsed.model)}/{parsed.action}"
        found = {each.place: [each.client.ask("POST", path, members)] for each in servers}
        _show(parsed, found, console)
    elif parsed.watch:
        _watch(parsed, servers, console)
    else:
        _show(parsed, _states(parsed, servers), console)
    return 0


def _path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/rollout"


def _members(parsed: argparse.Namespace) -> dict[str, Any]:
    """The body of a change."""
    found: dict[str, Any] = {"reason": parsed.reason} if parsed.reason else {}
    if parsed.action == "start":
        found |= {"version": parsed.version, "again": parsed.again}
        if parsed.step:
            found["steps"] = [read_step(each) for each in parsed.step]
    elif parsed.action == "weight":
        found["weight"] = parsed.weight
    return found


def _states(parsed: argparse.Namespace, servers: Sequence[RolloutServer]) -> dict[str, list[Row]]:
    return {each.place: each.rollouts(parsed.model) for each in servers}


def _show(parsed: argparse.Namespace, found: Mapping[str, Sequence[Row]], console: Console) -> None:
    if parsed.json:
        _write_json([{"server": place, **row} for place, rows in found.items() for row in rows])
    else:
        console.print(tables(found))


def _write_json(found: Sequence[Row]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _watch(parsed: argparse.Namespace, servers: Sequence[RolloutServer], console: Console) -> None:
    """Show the states once a second; JSON is one line for each change."""
    states = partial(_states, parsed, servers)
    if parsed.json:
        before: Mapping[str, Sequence[Row]] = {}
        while True:
            found = states()
            if found != before:
                _show(parsed, found, console)
            before = found
            time.sleep(POLL_SECS)
    with Live(tables(states()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(POLL_SECS)
            live.update(tables(states()), refresh=True)


def _show_histories(
    parsed: argparse.Namespace, servers: Sequence[RolloutServer], console: Console
) -> None:
    path = f"{_path(parsed.model)}/history"
    found = [
        {"server": each.place, **row} for each in servers for row in each.client.ask("GET", path)
    ]
    if parsed.json:
        _write_json(found)
        return
    console.print(_table(HISTORY, servers, [(row["server"], _transition(row)) for row in found]))


# Waiting.


def _wait(parsed: argparse.Namespace, servers: Sequence[RolloutServer], console: Console) -> int:
    """Wait until every server has promoted the version, or one has not."""
    limit = read_duration(parsed.timeout, "--timeout") if parsed.timeout else math.inf
    ends_at = time.monotonic() + limit
    for each in servers:
        row = _ended(each, parsed.model, ends_at)
        _show(parsed, {each.place: [row]}, console)
        if RolloutState(row["state"]) in OPEN and row["state"] != RolloutState.PAUSED:
            return EXIT_NOT_IN_TIME
        if status := EXIT_STATUS.get(RolloutState(row["state"]), EXIT_NOT_PROMOTED):
            return status
    return 0


def _ended(server: RolloutServer, model: str, ends_at: float) -> Row:
    """The state of a rollout that has ended or is paused, or the last one before `ends_at`.

    A server that does not answer for some time is asked again.
    """
    first: Row | None = None
    for row in _looks(server, model, ends_at):
        if "state" not in row:
            raise InferenceError(Code.NOT_FOUND, f"{server.place}: '{model}' has no rollout")
        first = row if first is None else first
        if row["candidate"] != first["candidate"]:
            return {**first, "state": RolloutState.SUPERSEDED.value}
        if row["state"] == RolloutState.PAUSED or RolloutState(row["state"]) not in OPEN:
            break
    return row


def _looks(server: RolloutServer, model: str, ends_at: float) -> Iterator[Row]:
    """The state of a rollout once a second, at least one time."""
    while True:
        try:
            (row,) = server.rollouts(model)
            yield row
        except InferenceError as error:
            if error.code is not Code.UNAVAILABLE or time.monotonic() >= ends_at:
                raise
        left = ends_at - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(POLL_SECS, left))


# Tables.


def tables(found: Mapping[str, Sequence[Row]]) -> RenderableType:
    """The rollouts, their guardrails, and the reasons of their states."""
    pairs = [(place, row) for place, rows in found.items() for row in rows if "state" in row]
    if not pairs:
        return Text("no rollouts")
    rollouts = _table(ROLLOUT, found, [(place, _cells(row)) for place, row in pairs])
    lines = [(place, _guardrail(row, each)) for place, row in pairs for each in row["guardrails"]]
    guardrails = _table(GUARDRAIL, found, lines)
    reasons = [Text(f"{row['model']}: {row['reason']}") for _, row in pairs if row["reason"]]
    return Group(rollouts, *([guardrails] if lines else []), *reasons)


def _table(
    names: Sequence[str], servers: Sized, lines: Iterable[tuple[str, Sequence[str]]]
) -> Table:
    """A table of lines with their servers, which are shown if there are several."""
    several = len(servers) > 1
    shown = ("server", *names) if several else names
    made = Table(*(Column(name, overflow="fold") for name in shown))
    for place, cells in lines:
        made.add_row(*map(Text, (place, *cells) if several else cells))
    return made


def _cells(row: Row) -> Sequence[str]:
    share = f"{row['weight']:g} %"
    if row["shadow"]:
        share = f"shadow {row['shadow']:g} %"
    return (
        row["model"],
        _versions(row),
        row["state"],
        share,
        f"{row['step']} of {len(row['steps'])}",
        f"{_time(row['spent_secs'])} of {_time(row['for_secs'])}",
        f"{row['requests']} of {row['min_requests']}",
    )


def _versions(row: Row) -> str:
    """Stable and the candidate; the latter alone once it is promoted."""
    stable, candidate = row["stable"], row["candidate"]
    return f"{stable} -> {candidate}" if row["state"] != RolloutState.PROMOTED else str(candidate)


def _transition(row: Row) -> Sequence[str]:
    place = (str(row["step"] + 1), f"{row['weight']:g} %")
    return (row["time"], row["state"], *place, row["by"], row["reason"])


def _guardrail(rollout: Row, each: Row) -> Sequence[str]:
    expected = _rate(each["stable"]) if "max" not in each else f"at most {each['max']:.3%}"
    mark = "broken, " if each["breached"] else ""
    evidence = f"{mark}10^{each['evidence']:.1f} of 10^{each['limit']:.1f}"
    return rollout["model"], each["guardrail"], evidence, _rate(each["candidate"]), expected


def _rate(counts: Row) -> str:
    return f"{counts['events']:g} of {counts['requests']:g} ({counts['rate']:.2%})"


def _time(secs: float) -> str:
    minutes, rest = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
