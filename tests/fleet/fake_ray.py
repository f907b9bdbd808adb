"""Ray's library, as far as the replicas of a fleet need it: the test answers its calls."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gateway.fleet.ray_addresses import encode
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView

NAME = "sluice:f:m:1"


class FakeRay:
    """Calls of Ray on groups and actors in memory; an actor without a view does not answer.

    Those that are `lost` answer with an error.
    """

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.views: dict[str, object] = {}
        self.late: list[str] = []
        self.lost: dict[str, str] = {}
        self.placed: list[Any] = []
        self.takes_actors = False
        self.nodes = {0: "n"}

    def add(self, name: str, phase: ReplicaPhase | None) -> None:
        """Add a replica that is placed."""
        self.groups.add(name)
        found = phase and ReplicaView(name=name, model="m", phase=phase, node="n")
        self.views[name] = found and encode(found)

    def placement_group_table(self) -> dict[str, Any]:
        placed = {"state": "CREATED", "bundles_to_node_id": self.nodes}
        stats = {"scheduling_state": "QUEUED"}
        return {name: {"name": name, "stats": stats, **placed} for name in self.groups}

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        return [{"name": name, "namespace": "sluice"} for name in self.views]

    def placement_group(self, bundles: Sequence[Any], *, name: str, **options: Any) -> str:
        self.groups.add(name)
        self.placed.append((bundles, options))
        return name

    def get_placement_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name

    def remove_placement_group(self, name: str) -> None:
        self.groups.remove(name)

    def get_actor(self, name: str, namespace: str) -> Any:
        if name not in self.views:
            raise ValueError(name)
        return self.actor(name)

    def actor(self, name: str) -> Any:
        """The handle of an actor, whose questions are its name."""
        calls = {"drain": lambda: self.drain(name)}
        calls |= dict.fromkeys(("view", "next_status", "name"), lambda: name)
        return SimpleNamespace(**{key: SimpleNamespace(remote=call) for key, call in calls.items()})

    def drain(self, name: str) -> None:
        """End a replica, upon which a late one comes."""
        self.add(name, ReplicaPhase.ENDED)
        for each in self.late:
            self.add(each, ReplicaPhase.READY)
        self.late.clear()

    def kill(self, actor: Any) -> None:
        del self.views[actor.name.remote()]

    def wait(self, asked: list[str], **options: Any) -> tuple[list[str], list[str]]:
        return [name for name in asked if name in self.lost or self.views.get(name)], []

    def get(self, asked: str, timeout: float = 0.0) -> object:
        if asked in self.lost:
            from ray.exceptions import RayError

            raise RayError(self.lost[asked])
        return self.views[asked]

    def remote(self, kind: type) -> Any:
        def made(**options: Any) -> Any:
            def make(*arguments: Any) -> Any:
                if not self.takes_actors:
                    raise ValueError("a whole number of GPUs")
                self.placed.append((arguments, options))
                return self.actor(options["name"])

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=made)
