"""The command `sluice fleet`: the replicas of a fleet on Ray, and its end."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gateway.fleet import ray_cluster, ray_state
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_views import ReplicaPhase
from gateway.settings import netloc

COLUMNS = ("model", "replica", "state", "node", "address", "need")


def run(parsed: argparse.Namespace, console: Console) -> None:
    """Run `status` or `down`; UNAVAILABLE with the reason of Ray."""
    ray_state.connect()
    if parsed.action == "status":
        models = ray_cluster.next_status(parsed.fleet_name)
        console.print(status_table(models))
        for each in models:
            if each.trouble:
                console.print(Text(f"{each.model}: {each.trouble}"))
            if each.rollout.is_open:
                state = each.rollout.state
                shown = f"rollout of version {state['candidate']}: {state['state']}"
                console.print(Text(f"{each.model}: {shown}, {state['weight']:g} %"))
        return
    ended = ray_cluster.end_fleet(parsed.fleet_name, parsed.drain_secs)
    console.print(Text(f"fleet '{parsed.fleet_name}' ended, with {ended} replicas"))


def status_table(models: Sequence[ModelStatus]) -> Table:
    """A row for each model, and one for each of its replicas."""
    shown = Table(*(Column(name, overflow="fold") for name in COLUMNS))
    for model in models:
        ready = sum(each.phase is ReplicaPhase.READY for each in model.replicas)
        count = f"{ready} of {model.wanted}"
        shown.add_row(Text(model.model), count, "", "", "", f"{model.need:.2f}")
        for each in model.replicas:
            name, address = each.name.rpartition(":")[2], netloc(each.host, each.port)
            where = address if each.port else ""
            shown.add_row("", name, each.phase, each.node[:8], where, f"{each.need:.2f}")
    return shown
