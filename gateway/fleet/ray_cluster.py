"""A fleet in a Ray cluster: actors, their placement groups, and questions to the controller."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import (
    get_node_ip_address,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import RayFleet, encode
from gateway.fleet.ray_controller import Controller, ModelStatus, read_status
from gateway.fleet.ray_news import OffersByModel, read_known, read_news
from gateway.fleet.ray_replica import THIS_MACHINE, ReplicaProcess
from gateway.fleet.ray_repository import Repository, refusal
from gateway.fleet.ray_state import (
    NAMESPACE,
    RayState,
    UnreachedError,
    cause,
    controller_name,
    described,
    groups,
    prefix,
    replica_names,
    unavailable,
)
from gateway.fleet.ray_views import NOT_READY, ReplicaPhase, ReplicaView, read_view
from gateway.models.model_folder import Versions
from gateway.models.replicas import CPU, GPU, ReplicaRules
from gateway.observability.log import line_handler

log = logging.getLogger("sluice.fleet")

DECISION_SECS = 2.0
ANSWER_SECS = 1.0
"""A replica actor that does not answer for this time is silent."""
CONTROLLER_SECS = 20.0
DECIDED_SECS = 15.0
"""A status waits for the next decision for this time, which ends before CONTROLLER_SECS."""
END_SECS = 60.0
"""Replicas are gone this time after the limit of their drain, or are named in an error."""
POLL_SECS = 0.1
ONGOING = "the last one has not ended"
WITH_REQUESTS = (ReplicaPhase.READY, ReplicaPhase.SILENT, ReplicaPhase.DRAINING)
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
        self._failure = ONGOING
        self._deciding = asyncio.get_running_loop().create_task(self._decide())

    async def _decide(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._controller.decide)
            except Exception as error:
                # Around one decision: the next one sees the cluster anew.
                log.exception("decision failed")
                self._failure = cause(error)
            else:
                self._failure = ONGOING
                decided, self._decided = self._decided, asyncio.Event()
                decided.set()
            await asyncio.sleep(DECISION_SECS)

    async def next_status(self) -> bytes:
        """The models and their replicas after the next decision; TimeoutError with the reason."""
        try:
            await asyncio.wait_for(self._decided.wait(), DECIDED_SECS)
        except TimeoutError:
            # Ray passes on errors that are made of their text alone.
            text = f"no decision for {DECIDED_SECS:g} s: {self._failure}"
            raise TimeoutError(text) from None
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
        self._causes: dict[str, str] = {}
        self._were_not_ready: set[str] = set()

    def replicas(self) -> Sequence[ReplicaView]:
        """See `Cluster`."""
        placed = dict(groups(self._fleet.name))
        actors = replica_names(self._fleet.name)
        answers = self._answers(actors)
        self._causes = {name: each for name, each in self._causes.items() if name in placed}
        found = [
            replace(
                answers.get(name) or self._unanswered(name, group, name in actors),
                further_nodes=frozenset(group["bundles_to_node_id"].values()),
            )
            for name, group in placed.items()
        ]
        self._were_not_ready = {each.name for each in found if each.phase in NOT_READY}
        return found

    def make(self, model: str, rules: ReplicaRules) -> None:
        """See `Cluster`."""
        own = f"{rules.description}-{secrets.token_hex(4)}"
        name = f"{prefix(self._fleet.name)}{model}:{own}"
        try:
            self._make(name, rules)
        except (RayError, TypeError, ValueError) as error:
            self.remove(name)
            raise InferenceError(
                Code.UNAVAILABLE, f"Ray refuses a replica: {cause(error)}"
            ) from None

    def _make(self, name: str, rules: ReplicaRules) -> None:
        bundles = [dict(each) for each in rules.bundles or (rules.resources,)]
        # Ray looks for the values of `in(a, b)` with their spaces.
        labels = {name: value.replace(", ", ",") for name, value in rules.labels.items()}
        group = placement_group(
            bundles,
            strategy="PACK" if rules.bundles else "STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[labels] * len(bundles),
        )
        # The actor is in the first bundle, and leaves all of it to the workers of its engine.
        resources = dict(rules.resources)
        cpus, gpus = resources.pop(CPU, 0), resources.pop(GPU, 0)
        use = GpuUse.OWN if gpus else GpuUse.NONE
        options: dict[str, Any] = {"memory": resources.pop(MEMORY)} if MEMORY in resources else {}
        actor = (
            ray.remote(ReplicaActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                resources=resources,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                **options,
            )
            .remote(name, self._fleet, rules.left_out, GpuUse.OF_WORKERS if rules.bundles else use)
        )
        # The answer of an actor that fails at its start has the reason.
        self._asked[name] = actor.view.remote()
        self._were_not_ready.add(name)

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
        asked = {**self._asked}
        for name in actors:
            if name not in asked:
                with suppress(ValueError):
                    asked[name] = ray.get_actor(name, NAMESPACE).view.remote()
        done = _done(list(asked.values()))
        self._asked = {name: each for name, each in asked.items() if each not in done}
        found = {}
        for name in asked.keys() - self._asked.keys():
            # A view that another release writes in another way is none.
            self._causes.pop(name, None)
            try:
                found[name] = read_view(ray.get(asked[name]))
            except RayError as error:
                self._causes[name] = cause(error)
            except UNREADABLE:
                continue
        return found

    def _unanswered(self, name: str, group: Mapping[str, Any], has_actor: bool) -> ReplicaView:
        model, description = described(self._fleet.name, name)
        node = group["bundles_to_node_id"].get(0) or ""
        view = ReplicaView(
            name=name, model=model, phase=ReplicaPhase.SILENT, description=description, node=node
        )
        if not has_actor:
            reason = ": ".join(("its actor was lost", *filter(None, [self._causes.get(name)])))
            return replace(view, phase=ReplicaPhase.ENDED, reason=reason)
        if node:
            is_starting = name in self._were_not_ready
            return replace(view, phase=ReplicaPhase.STARTING) if is_starting else view
        is_infeasible = group["stats"]["scheduling_state"] == "INFEASIBLE"
        phase = ReplicaPhase.INFEASIBLE if is_infeasible else ReplicaPhase.PENDING
        return replace(view, phase=phase)


def make_controller(fleet: RayFleet) -> None:
    """Make the controller of a fleet if there is none; Ray restarts it until `end_fleet`.

    UNAVAILABLE with the reason of Ray.
    """
    made = ray.remote(ControllerActor).options(
        name=controller_name(fleet.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        get_if_exists=True,
    )
    with unavailable():
        made.remote(fleet)


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
        raise _of_another_release(fleet, f"whose answer cannot be read: {error}") from None


def report(fleet: str, router: str, news: bytes) -> None:
    """Report the news of a router to the controller; raises as `next_status`."""
    _asked(fleet, "report", router, news)


def _asked(fleet: str, method: str, *arguments: object) -> Any:
    """The result of a method of the controller."""
    try:
        actor = ray.get_actor(controller_name(fleet), NAMESPACE)
        return ray.get(getattr(actor, method).remote(*arguments), timeout=CONTROLLER_SECS)
    except RayError as error:
        # An error of the method itself, too: also one that is a ValueError.
        text = f"the controller of fleet '{fleet}' does not answer: {cause(error)}"
        kind = UnreachedError if isinstance(error, RayActorError) else InferenceError
        raise kind(Code.UNAVAILABLE, text) from None
    except ValueError:
        text = f"fleet '{fleet}' has no controller: `sluice serve --fleet ray` makes one"
        raise InferenceError(Code.NOT_FOUND, text) from None
    except AttributeError:
        raise _of_another_release(fleet, f"which has no '{method}'") from None


def _of_another_release(fleet: str, what: str) -> InferenceError:
    text = f"the controller of fleet '{fleet}' is of another release, {what}"
    return InferenceError(Code.UNAVAILABLE, f"{text}; end it with `sluice fleet down`")


def end_fleet(fleet: str, drain_secs: float, progressed: Callable[[], None] = lambda: None) -> int:
    """End the controller, then every replica when it has ended; returns their number.

    Calls `progressed` as Ray answers. UNAVAILABLE if it says why it does not, or some are left
    END_SECS after the limit.
    """
    with unavailable():
        with suppress(ValueError):
            ray.kill(ray.get_actor(controller_name(fleet), NAMESPACE))
        return _end_replicas(fleet, time.monotonic() + drain_secs, progressed)


def _end_replicas(fleet: str, ends_at: float, progressed: Callable[[], None]) -> int:
    cluster = RayCluster(RayFleet(fleet))
    ended: set[str] = set()
    # A replica that the controller was about to make comes later than its end.
    while replicas := cluster.replicas():
        late_secs = time.monotonic() - ends_at
        if late_secs >= END_SECS:
            names = ", ".join(each.name for each in replicas)
            why = "a router that began meanwhile makes a controller: stop it, and run this again"
            late = f"{END_SECS:g} s after the limit of their drain"
            text = f"fleet '{fleet}' still has replicas, {late}: {names}; {why}"
            raise InferenceError(Code.UNAVAILABLE, text)
        for each in replicas:
            if late_secs >= 0 or each.phase not in WITH_REQUESTS:
                cluster.remove(each.name)
            elif each.name not in ended:
                cluster.drain(each.name)
            ended.add(each.name)
            progressed()
        time.sleep(POLL_SECS)
    return len(ended)


def _done(asked: list[Any]) -> set[Any]:
    """Those of some questions that are answered within the time."""
    if not asked:
        return set()
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECS)
    return set(done)


def _repositories(fleet: RayFleet) -> tuple[list[str], str]:
    """The folders of the repositories of a fleet, and the name of preferred configurations."""
    names = fleet.values("--model-config-name")
    return fleet.values("--model-repository"), "".join(names)
