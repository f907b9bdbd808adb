"""A fleet in a Ray cluster: actors, their placement groups, and the connection of a driver."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import (
    get_node_ip_address,
    get_placement_group,
    list_named_actors,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import RayFleet, encode
from gateway.fleet.ray_controller import Controller, ModelStatus, read_status
from gateway.fleet.ray_news import OffersByModel, read_known, read_news
from gateway.fleet.ray_replica import THIS_MACHINE, ReplicaProcess
from gateway.fleet.ray_repository import Repository, refusal
from gateway.fleet.ray_state import RayState, gcs
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView, read_view
from gateway.models.model_folder import Versions
from gateway.models.replicas import CPU, GPU, ReplicaRules
from gateway.observability.log import line_handler

log = logging.getLogger("sluice.fleet")

NAMESPACE = "sluice"
DECISION_SECS = 2.0
ANSWER_SECS = 1.0
"""A replica actor that does not answer for this time is silent."""
CONTROLLER_SECS = 20.0
POLL_SECS = 0.1
WITH_REQUESTS = (ReplicaPhase.READY, ReplicaPhase.SILENT, ReplicaPhase.DRAINING)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
GROUP_OPTION = "--backend-config=vllm,placement-group"
UNREADABLE = (msgspec.DecodeError, TypeError)
"""Errors of an answer of another release."""
Found = TypeVar("Found")
ZONE_LABEL = "ray.io/availability-zone"
MEMORY = "memory"
"""The resource of a node that is an option of its own of actors."""


class GpuUse(Enum):
    """The GPUs of a replica: its own ones, or those of the Ray workers of its engine."""

    NONE = auto()
    OWN = auto()
    OF_WORKERS = auto()


class ReplicaActor:
    """The actor of one replica, in its placement group; it refuses other files of the model."""

    def __init__(self, name: str, fleet: RayFleet, left_out: Versions, gpus: GpuUse) -> None:
        is_safe = any(map(fleet.values, ("--fleet-secret-file", "--fleet-server-cert")))
        host = get_node_ip_address() if is_safe else THIS_MACHINE
        context = ray.get_runtime_context()
        node = context.get_node_id()
        options, environment = (*fleet.options, f"--left-out={encode(left_out).decode()}"), {}
        if gpus is GpuUse.OF_WORKERS:
            # The engine is a driver of this cluster, and its workers have the group of this actor.
            options = (*options, f"{GROUP_OPTION}={context.get_placement_group_id()}")
            environment["RAY_ADDRESS"] = context.gcs_address
        elif gpus is GpuUse.NONE:
            # Ray hides the GPUs of other replicas only from those that have some.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if zone := context.get_node_labels().get(ZONE_LABEL):
            options = (*options, f"--fleet-zone={zone}")
        model, description = described(fleet.name, name)
        view = ReplicaView(
            name=name,
            model=model,
            phase=ReplicaPhase.STARTING,
            description=description,
            node=node,
            host=host,
        )
        refuses = partial(refusal, *_repositories(fleet), model, description, left_out)
        self._process = ReplicaProcess(view, options, environment, refuses)

    def view(self) -> bytes:
        """The present view of the replica."""
        return encode(self._process.view())

    def drain(self) -> None:
        """Let the replica complete its requests and end."""
        self._process.drain()


class ControllerActor:
    """The one actor that decides; it is restarted by Ray, and reads again what it needs."""

    def __init__(self, fleet: RayFleet) -> None:
        logging.basicConfig(level=logging.INFO, handlers=[line_handler()])
        self._controller = Controller(RayCluster(fleet), Repository(*_repositories(fleet)).files)
        self._decided = asyncio.Event()
        self._deciding = asyncio.get_running_loop().create_task(self._decide())

    async def _decide(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._controller.decide)
            except Exception:
                # Around one decision: the next one sees the cluster anew.
                log.exception("decision failed")
            else:
                decided, self._decided = self._decided, asyncio.Event()
                decided.set()
            await asyncio.sleep(DECISION_SECS)

    async def next_status(self) -> bytes:
        """The models and their replicas after the next decision."""
        await self._decided.wait()
        return encode(self._controller.status())

    async def report(self, router: str, news: bytes) -> None:
        """Take the news of a router."""
        self._controller.heard.take(router, read_news(news))

    async def offers(self, models: Sequence[str]) -> bytes:
        """The offers of some models that are known."""
        known = self._controller.heard.offers
        return encode({name: known[name] for name in models if name in known})


class RayCluster(RayState):
    """The replicas of one fleet: an actor and a placement group of one name for each.

    A group without an actor is a replica that has ended.
    """

    def __init__(self, fleet: RayFleet) -> None:
        super().__init__(fleet.name)
        self._fleet = fleet
        self._asked: dict[str, Any] = {}
        self._were_starting: set[str] = set()

    def replicas(self) -> Sequence[ReplicaView]:
        """See `Cluster`."""
        groups = dict(_groups(self._fleet.name))
        actors = _replica_names(self._fleet.name)
        answers = self._answers(actors)
        found = [
            replace(
                answers.get(name) or self._unanswered(name, group, name in actors),
                further_nodes=frozenset(group["bundles_to_node_id"].values()),
            )
            for name, group in groups.items()
        ]
        self._were_starting = {each.name for each in found if each.phase is ReplicaPhase.STARTING}
        return found

    def make(self, model: str, rules: ReplicaRules) -> None:
        """See `Cluster`."""
        own = f"{rules.description}-{secrets.token_hex(4)}"
        name = f"{_prefix(self._fleet.name)}{model}:{own}"
        try:
            self._make(name, rules)
        except (RayError, TypeError, ValueError) as error:
            self.remove(name)
            raise InferenceError(Code.UNAVAILABLE, f"Ray refuses a replica: {error}") from None

    def _make(self, name: str, rules: ReplicaRules) -> None:
        bundles = [dict(each) for each in rules.bundles or (rules.resources,)]
        group = placement_group(
            bundles,
            strategy="PACK" if rules.bundles else "STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[dict(rules.labels)] * len(bundles),
        )
        # The actor is in the first bundle, and leaves all of it to the workers of its engine.
        resources = dict(rules.resources)
        cpus, gpus = resources.pop(CPU, 0), resources.pop(GPU, 0)
        use = GpuUse.OWN if gpus else GpuUse.NONE
        options: dict[str, Any] = {"memory": resources.pop(MEMORY)} if MEMORY in resources else {}
        ray.remote(ReplicaActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=cpus,
            num_gpus=gpus,
            resources=resources,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            **options,
        ).remote(name, self._fleet, rules.left_out, GpuUse.OF_WORKERS if rules.bundles else use)

    def drain(self, name: str) -> None:
        """See `Cluster`."""
        with suppress(ValueError, RayError):
            ray.get_actor(name, NAMESPACE).drain.remote()

    def remove(self, name: str) -> None:
        """See `Cluster`."""
        self._asked.pop(name, None)
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, NAMESPACE))
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))

    def _answers(self, actors: Sequence[str]) -> Mapping[str, ReplicaView]:
        """The views of the replicas that answer now; each has one question at a time."""
        asked = {}
        for name in actors:
            with suppress(ValueError):
                known = self._asked.get(name)
                asked[name] = known or ray.get_actor(name, NAMESPACE).view.remote()
        done = _done(list(asked.values()))
        self._asked = {name: each for name, each in asked.items() if each not in done}
        found = {}
        for name in asked.keys() - self._asked.keys():
            # A view that another release writes in another way is none.
            with suppress(RayError, *UNREADABLE):
                found[name] = read_view(ray.get(asked[name]))
        return found

    def _unanswered(self, name: str, group: Mapping[str, Any], has_actor: bool) -> ReplicaView:
        model, description = described(self._fleet.name, name)
        node = group["bundles_to_node_id"].get(0) or ""
        view = ReplicaView(
            name=name, model=model, phase=ReplicaPhase.SILENT, description=description, node=node
        )
        if not has_actor:
            return replace(view, phase=ReplicaPhase.ENDED, reason="its actor was lost")
        if node:
            is_starting = name in self._were_starting
            return replace(view, phase=ReplicaPhase.STARTING) if is_starting else view
        is_infeasible = group["stats"]["scheduling_state"] == "INFEASIBLE"
        phase = ReplicaPhase.INFEASIBLE if is_infeasible else ReplicaPhase.PENDING
        return replace(view, phase=phase)


def connect() -> None:
    """Connect this process as a driver; UNAVAILABLE with the reason of Ray."""
    try:
        ray.init(
            address="auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RayError, ConnectionError, RuntimeError) as error:
        raise InferenceError(Code.UNAVAILABLE, f"Ray cannot be used: {error}") from None


def cluster_id() -> str:
    """The id of the cluster, which is new after a restart without persistence."""
    return str(gcs().cluster_id.hex())


def was_restarted(cluster: str) -> bool:
    """Whether there is another cluster at the address of this one; false if that is not known."""
    with suppress(RayError):
        return cluster_id() != cluster
    return False


def make_controller(fleet: RayFleet) -> None:
    """Make the controller of a fleet if there is none; Ray restarts it until `end_fleet`."""
    ray.remote(ControllerActor).options(
        name=_controller_name(fleet.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        get_if_exists=True,
    ).remote(fleet)


def next_status(fleet: str) -> Sequence[ModelStatus]:
    """The status after the next decision; UNAVAILABLE if the controller does not answer.

    NOT_FOUND if there is none.
    """
    return _read(fleet, read_status, _asked(fleet, "next_status"))


def offers(fleet: str, models: Sequence[str]) -> OffersByModel:
    """The offers of some models; raises as `next_status`."""
    return _read(fleet, read_known, _asked(fleet, "offers", models))


def _read(fleet: str, reader: Callable[[bytes], Found], answer: bytes) -> Found:
    """The content of an answer of the controller, which may be of another release."""
    try:
        return reader(answer)
    except UNREADABLE as error:
        text = (
            f"the controller of fleet '{fleet}' is of another release, whose answer cannot be "
            f"read: {error}; end it with `sluice fleet down`"
        )
        raise InferenceError(Code.UNAVAILABLE, text) from None


def report(fleet: str, router: str, news: bytes) -> None:
    """Report the news of a router to the controller; raises as `next_status`."""
    _asked(fleet, "report", router, news)


def _asked(fleet: str, method: str, *arguments: object) -> Any:
    """The result of a method of the controller."""
    try:
        actor = ray.get_actor(_controller_name(fleet), NAMESPACE)
        return ray.get(getattr(actor, method).remote(*arguments), timeout=CONTROLLER_SECS)
    except ValueError:
        text = f"fleet '{fleet}' has no controller: `sluice serve --fleet ray` makes one"
        raise InferenceError(Code.NOT_FOUND, text) from None
    except RayError as error:
        text = f"the controller of fleet '{fleet}' does not answer: {cause(error)}"
        raise InferenceError(Code.UNAVAILABLE, text) from None


def cause(error: RayError) -> str:
    """The last line of an error of Ray, which is often a coloured traceback."""
    lines = COLOURS.sub("", str(error)).split("\n")
    return next((each.strip() for each in reversed(lines) if each.strip()), type(error).__name__)


def end_fleet(fleet: str, drain_secs: float) -> int:
    """End the controller, then every replica when it has ended; returns their number."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(_controller_name(fleet), NAMESPACE))
    cluster = RayCluster(RayFleet(fleet))
    ended: set[str] = set()
    ends_at = time.monotonic() + drain_secs
    # A replica that the controller was about to make comes later than its end.
    while replicas := cluster.replicas():
        is_over = time.monotonic() >= ends_at
        for each in replicas:
            if is_over or each.phase not in WITH_REQUESTS:
                cluster.remove(each.name)
            elif each.name not in ended:
                cluster.drain(each.name)
            ended.add(each.name)
        time.sleep(POLL_SECS)
    return len(ended)


def _done(asked: list[Any]) -> set[Any]:
    """Those of some questions that are answered within the time."""
    if not asked:
        return set()
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECS)
    return set(done)


def _controller_name(fleet: str) -> str:
    return f"sluice:{fleet}"


def _prefix(fleet: str) -> str:
    return f"{_controller_name(fleet)}:"


def described(fleet: str, name: str) -> tuple[str, str]:
    """The model of a replica and its description, which are parts of its name."""
    model, _, own = name.removeprefix(_prefix(fleet)).rpartition(":")
    return model, own.rpartition("-")[0]


def _repositories(fleet: RayFleet) -> tuple[list[str], str]:
    """The folders of the repositories of a fleet, and the name of preferred configurations."""
    names = fleet.values("--model-config-name")
    return fleet.values("--model-repository"), "".join(names)


def _replica_names(fleet: str) -> list[str]:
    actors = list_named_actors(all_namespaces=True)
    named = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return [name for name in named if name.startswith(_prefix(fleet))]


def _groups(fleet: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for group in placement_group_table().values():
        if group["name"].startswith(_prefix(fleet)) and group["state"] != "REMOVED":
            yield group["name"], group
