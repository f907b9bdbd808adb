"""The child process of a router that reads the addresses of replicas in a Ray cluster."""

import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

from gateway.errors import Code, InferenceError
from gateway.fleet import ray_cluster, ray_state
from gateway.fleet.ray_addresses import RayQuestion, RayTable, encode, read_question
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_news import ModelNews, OffersByModel
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.observability.log import line_handler

log = logging.getLogger("sluice.fleet")

PAUSE_SECS = 1.0
UNREACHED_SECS = 20.0
"""Another process asks for a controller that is not reached for this time, while the head is.

Ray's library may miss a notice while the head is restarted, and calls the process of an actor that
has ended from then on.
"""
ADDRESSED = (ReplicaPhase.READY, ReplicaPhase.DRAINING)


def main() -> None:
    """Write a table for each decision of the controller, until Ray's library is of no more use."""
    logging.basicConfig(level=logging.WARNING, handlers=[line_handler()])
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
    lines: queue.Queue[bytes] = queue.Queue(1)
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    try:
        ray_state.connect()
        cluster = ray_state.cluster_id()
        if question.makes_controller(cluster):
            ray_cluster.make_controller(question.fleet)
    except InferenceError as error:
        yield RayTable(reason=error.message)
        return
    fleet = question.fleet.name
    threading.Thread(target=_report, args=(fleet, lines), daemon=True).start()
    written: dict[str, str] = {}
    failing_since: float | None = None
    while True:
        try:
            models = ray_cluster.next_status(fleet)
            known = {each.model: each.known for each in models if each.known}
            new = [name for name, digest in known.items() if written.get(name) != digest]
            yield table(models, cluster, ray_cluster.offers(fleet, new) if new else {})
            written.update(known)
            failing_since = None
        except InferenceError as error:
            found = ray_state.found_cluster()
            was_restarted = found not in ("", cluster)
            is_ended = error.code is Code.NOT_FOUND and not was_restarted
            yield RayTable(reason=error.message, cluster=cluster, is_ended=is_ended)
            if was_restarted:
                return  # Ray's library in this process stays with the old one.
            now = time.monotonic()
            is_unreached = found and isinstance(error, ray_state.UnreachedError)
            failing_since = (failing_since or now) if is_unreached else None
            if failing_since is not None and now - failing_since >= UNREACHED_SECS:
                return
            time.sleep(PAUSE_SECS)


def _read(router: BinaryIO, lines: "queue.Queue[bytes]") -> None:
    """Take the lines of the router, of which the last one counts, and end with it."""
    for line in router:
        with suppress(queue.Empty):
            lines.get_nowait()
        lines.put(line)
    os._exit(1)


def _report(fleet: str, lines: "queue.Queue[bytes]") -> None:
    """Pass the news of the router on; what the controller does not get is repeated."""
    router, logged = secrets.token_hex(8), ""
    while True:
        reason, news = "", lines.get()
        try:
            ray_cluster.report(fleet, router, news)
        except InferenceError as error:
            reason = error.message
        if reason and reason != logged:
            log.warning("news not reported", extra={"fleet": fleet, "reason": reason})
        logged = reason


def table(models: Sequence[ModelStatus], cluster: str, offers: OffersByModel) -> RayTable:
    """The table of a status."""
    return RayTable(
        replicas=_addresses(each for model in models for each in model.replicas),
        troubles={each.model: each.trouble for each in models if each.trouble},
        cluster=cluster,
        outdated=_addresses(each for model in models for each in model.outdated),
        models={
            each.model: ModelNews(each.refusal, each.known, each.description, each.rollout)
            for each in models
        },
        offers=offers,
    )


def _addresses(replicas: Iterable[ReplicaView]) -> tuple[tuple[str, int], ...]:
    return tuple((each.host, each.port) for each in replicas if each.phase in ADDRESSED)


if __name__ == "__main__":
    main()
