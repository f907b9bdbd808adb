"""A replica with two bundles on Ray, whose engine is a stand-in: a driver, and the engine itself.

`python -m tests.fleet.spread_replica FILE` makes the replica, and ends it once its engine has
written the nodes of its workers to the file.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINE_SECS = 120.0
BUNDLES = ({"CPU": 0.5}, {"CPU": 0.75})
"""More than a node of the tests has: the workers are on two."""


def main(file: Path) -> None:
    """Make the replica, wait for its engine, and end both."""
    from ray.util import placement_group_table

    from gateway.fleet import ray_cluster, ray_state
    from gateway.fleet.ray_addresses import RayFleet
    from gateway.models.replicas import ReplicaRules

    class Replica:
        """The process of a replica, in which the engine alone runs."""

        def __init__(
            self, view: object, options: Sequence[str], own: Mapping[str, str], refusal: object
        ) -> None:
            command = [sys.executable, "-m", "tests.fleet.spread_replica", "engine", *options]
            # By `env`: a driver that is started by a worker of Ray needs its address only.
            subprocess.Popen(["/usr/bin/env", *map("=".join, own.items()), *command])

    class Actor:
        """The actor of that replica, in a process of Ray, whose module has the class above."""

        def __init__(self, *arguments: Any) -> None:
            from gateway.fleet import ray_cluster as there

            there.ReplicaProcess = Replica  # type: ignore[assignment, misc]
            there.ReplicaActor(*arguments)

        def view(self) -> bytes:
            """No view: this replica has no process of its own."""
            return b""

    ray_state.connect()
    ray_cluster.ReplicaActor = Actor  # type: ignore[assignment, misc]
    cluster = ray_cluster.RayCluster(RayFleet("spread", (f"--file={file}",)))
    cluster.make("m", ReplicaRules(bundles=BUNDLES))
    named = [each["name"] for each in placement_group_table().values()]
    (name,) = [each for each in named if each.startswith("sluice:spread:")]
    ends_at = time.monotonic() + ENGINE_SECS
    while not file.exists() and time.monotonic() < ends_at:
        time.sleep(0.1)
    cluster.remove(name)


def engine(file: Path, group: str) -> None:
    """Let vLLM's own code accept the group, and write what it has, and where workers are."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from vllm.config import ParallelConfig
    from vllm.platforms import current_platform
    from vllm.v1.executor.ray_utils import initialize_ray_cluster

    from backends.vllm.ray_workers import hand_group

    # vLLM refuses Ray on a platform without a resource of Ray.
    type(current_platform).ray_device_key = "CPU"
    config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
    hand_group(config, group)
    # A driver is on the node of its address: here all nodes have one, and it is on the head.
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    found = config.placement_group
    workers = [
        ray.remote(lambda: ray.get_runtime_context().get_node_id())
        .options(
            num_cpus=0.5,
            scheduling_strategy=PlacementGroupSchedulingStrategy(found, number),
        )
        .remote()
        for number in range(2)
    ]
    record = {
        "group": found.id.hex(),
        "bundles": found.bundle_specs,
        "nodes": ray.get(workers),
    }
    written = file.with_suffix(".new")
    written.write_text(json.dumps(record))
    written.rename(file)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        given = dict(each.rsplit("=", 1) for each in sys.argv[2:])
        engine(Path(given["--file"]), given["--backend-config=vllm,placement-group"])
    else:
        main(Path(sys.argv[1]))
