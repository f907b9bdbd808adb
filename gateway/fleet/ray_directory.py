"""The child process of a router that reads the addresses of replicas in a Ray cluster."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from gateway.errors import Code, InferenceError
from gateway.fleet import ray_cluster
from gateway.fleet.ray_addresses import RayQuestion, RayTable, encode, read_question
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_replica import end_with
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView

PAUSE_SECS = 1.0
ADDRESSED = (ReplicaPhase.READY, ReplicaPhase.DRAINING)


def main() -> None:
    """Write a table for each decision of the controller, until the router has ended."""
    question = read_question(sys.stdin.buffer.readline())
    # Only tables are written to the router: Ray's own texts go to the standard error.
    router = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for each in _tables(question):
        router.write(encode(each) + b"\n")
        router.flush()
    # A thread reads the standard input, and Ray may wait for a cluster that is gone.
    os._exit(0)


def _tables(question: RayQuestion) -> Iterator[RayTable]:
    threading.Thread(target=end_with, args=(sys.stdin.buffer,), daemon=True).start()
    try:
        ray_cluster.connect()
    except InferenceError as error:
        yield RayTable(reason=error.message)
        return
    cluster = ray_cluster.cluster_id()
    if question.makes_controller(cluster):
        ray_cluster.make_controller(question.fleet)
    while True:
        try:
            yield table(ray_cluster.next_status(question.fleet.name), cluster)
        except InferenceError as error:
            is_ended = error.code is Code.NOT_FOUND
            yield RayTable(reason=error.message, cluster=cluster, is_ended=is_ended)
            if ray_cluster.was_restarted(cluster):
                return  # Ray's library in this process stays with the old one.
            time.sleep(PAUSE_SECS)


def table(models: Sequence[ModelStatus], cluster: str) -> RayTable:
    """The table of a status."""
    return RayTable(
        replicas=_addresses(each for model in models for each in model.replicas),
        troubles={each.model: each.trouble for each in models if each.trouble},
        cluster=cluster,
        outdated=_addresses(each for model in models for each in model.outdated),
    )


def _addresses(replicas: Iterable[ReplicaView]) -> tuple[tuple[str, int], ...]:
    return tuple((each.host, each.port) for each in replicas if each.phase in ADDRESSED)


if __name__ == "__main__":
    main()
