"""A Ray cluster whose nodes are processes of this machine, and the fleets in it, from outside."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.scripted import installed
from tests.serving import ROOT, WAIT_SECS, Serving, wait_until

OBJECTS_BYTES = 80 << 20
LOST_SECS = 90.0
"""Ray notices a lost node within two seconds with the settings below; new processes take longer."""
COMMAND_SECS = 60.0
ONE_ON_A_NODE = {"replicas": 2, "replica_resources": '{"CPU": 0.6}'}
"""Parameters of a model of which a node with one CPU has room for one replica."""


def environment(folder: Path) -> Mapping[str, str]:
    """The environment of every process of a cluster: nothing outside of the folder is changed."""
    return {
        **installed(folder / "installed"),
        "HOME": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(folder / "gcs"),
        "RAY_health_check_failure_threshold": "3",
        "RAY_health_check_period_ms": "500",
    }


class RayNodes:
    """A head without CPUs and some nodes with one CPU each, labelled with the letters of `zones`.

    The environment of this process is that of its processes.
    """

    def __init__(self, zones: str) -> None:
        from ray.cluster_utils import Cluster

        self._head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": OBJECTS_BYTES,
            "gcs_server_port": _free_port(),
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=self._head)
        self.address: str = self._cluster.address
        self._nodes: dict[str, Any] = {}
        for zone in zones:
            self.add(zone)

    def add(self, zone: str, own: Mapping[str, str] | None = None) -> None:
        """Start a node if there is none in the zone; its processes have their `own` environment."""
        if zone not in self._nodes:
            self._nodes[zone] = self._cluster.add_node(
                num_cpus=1,
                labels={"zone": zone, "ray.io/availability-zone": zone},
                object_store_memory=OBJECTS_BYTES,
                env_vars=dict(own or {}),
            )

    def drain(self, zone: str) -> None:
        """Let a node complete its work, and get no more, as a cloud does before it takes one."""
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("ray")), "drain-node"),
                *(f"--address={self.address}", f"--node-id={self._nodes[zone].node_id}"),
                *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"),
                "--deadline-remaining-seconds=100",
            ],
            check=True,
            timeout=COMMAND_SECS,
        )

    def kill(self, zone: str) -> None:
        """Kill the raylet of a node."""
        self._cluster.remove_node(self._nodes.pop(zone), allow_graceful=False)

    def kill_head(self) -> None:
        """Kill every process of the head."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def start_head(self) -> None:
        """Start another head at its address, with its files."""
        self._cluster.add_node(**self._head)

    @property
    def gcs(self) -> int:
        """The process that has the state of the cluster."""
        found: int = self._cluster.head_node.all_processes["gcs_server"][0].process.pid
        return found

    def kill_gcs(self) -> None:
        """Kill the process that has the state of the cluster."""
        self._cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        """Start it again."""
        self._cluster.head_node.start_gcs_server()

    def record(self, fleet: str, model: str) -> bytes:
        """The record of the rollouts of a model in the state of the cluster."""
        from ray._raylet import GcsClient

        key = f'["{fleet}","{model}"]'.encode()
        found: bytes = GcsClient(address=self.address).internal_kv_get(key, b"sluice-rollouts")
        return found

    def log(self) -> str:
        """The lines that the actors have written."""
        files = Path(os.environ["RAY_TMPDIR"]).rglob("worker-*.err")
        return "\n".join(each.read_text() for each in files)

    def shutdown(self) -> None:
        """End every process of the cluster."""
        self._cluster.shutdown()

    def workers(self, name: str) -> Sequence[int]:
        """The processes of actors of that class, without those in `__init__`.

        Their title is the name of the actor until it returns: a replica may be there before its
        actor.
        """
        raylets = {self._raylet(node) for node in (self._cluster.head_node, *self._nodes.values())}
        found = _processes(lambda pid, command: command.startswith(f"ray::{name}"))
        return [pid for pid in found if parent(pid) in raylets]

    def is_running(self, zone: str) -> bool:
        """Whether the raylet of a node has not ended."""
        return self._nodes[zone].all_processes["raylet"][0].process.poll() is None

    def zone(self, replica: int) -> str:
        """The zone of a replica: its process is the child of an actor, and that of a raylet."""
        raylet = parent(parent(replica))
        return next(zone for zone, node in self._nodes.items() if self._raylet(node) == raylet)

    def _raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)


class Fleet:
    """A fleet as the command `sluice fleet` and the system show it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.environment = {"RAY_ADDRESS": address, "COLUMNS": "200"}

    def command(self, action: str) -> subprocess.CompletedProcess[str]:
        """Run `sluice fleet`."""
        with self.begun(action) as process:
            written, errors = process.communicate(timeout=COMMAND_SECS)
        return subprocess.CompletedProcess(process.args, process.returncode, written, errors)

    @contextmanager
    def begun(self, action: str) -> Iterator[subprocess.Popen[str]]:
        """The process of `sluice fleet`, which has ended after the block."""
        with subprocess.Popen(
            [sys.executable, "-m", "gateway", "fleet", action, f"--fleet-name={self.name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **self.environment},
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def replicas(self, model: str) -> Sequence[int]:
        """The processes of the replicas of a model."""
        named = f"--fleet-name={self.name}"
        return list(
            _processes(lambda pid, command: f"\0replica\0{model}\0" in command and named in command)
        )

    def wait_replicas(self, model: str, count: int, without: Sequence[int] = ()) -> Sequence[int]:
        """The processes of the replicas of a model, once they are as many without some."""

        def others() -> Sequence[int]:
            return [pid for pid in self.replicas(model) if pid not in without]

        wait_until(lambda: len(others()) == count, f"{count} replicas of {model}", LOST_SECS)
        return others()


def kill(pid: int) -> None:
    """Kill a process, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _command(pid), f"process {pid} has ended")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port


def _processes(is_wanted: Callable[[int, str], bool]) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if is_wanted(pid, _command(pid)):
            yield pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    """The process that has started a process, 0 if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def in_flight(http: httpx.Client) -> dict[int, int]:
    """The requests at each ready replica, by its port."""
    return {
        int(each["address"].rpartition(":")[2]): each["models"][0]["in_flight"]
        for each in http.get("/v2/fleet").json()["replicas"]
        if each["state"] == "READY" and each["models"]
    }


@contextmanager
def client_of_two(router: Serving) -> Iterator[httpx.Client]:
    """A client of a router, once that is connected to two replicas."""
    with httpx.Client(base_url=router.http, timeout=WAIT_SECS) as found:
        wait_until(lambda: len(in_flight(found)) == 2, "both replicas are ready", LOST_SECS)
        yield found
