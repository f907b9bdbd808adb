"""A changed model that one of three nodes cannot load, with a cluster in memory."""

from collections import Counter
from dataclasses import replace

from gateway.fleet.ray_views import ReplicaPhase
from gateway.models.replicas import ReplicaRules
from tests.gateway.fleet.test_ray_controller import REACHED_TICKS, FakeCluster
from tests.gateway.fleet.test_rolls import LOAD_FAILS, ONE, change, ended, those

STARTING, READY, ENDED = ReplicaPhase.STARTING, ReplicaPhase.READY, ReplicaPhase.ENDED
NODES = ("node0", "node1", "node2")
FAILED = {"phase": ENDED, "reason": LOAD_FAILS}


class ThreeNodes(FakeCluster):
    """Replicas of one description are on different nodes; `broken` cannot load the changed one."""

    broken = "node2"

    def make(self, model: str, rules: ReplicaRules) -> None:
        super().make(model, rules)
        alike = [each for each in self.views.values() if each.description == rules.description]
        used = Counter(each.node for each in alike if each.model == model)
        self.change(f"{model}:{self.made}", node=min(NODES, key=lambda node: used[node]))

    def run(self, decisions: int) -> int:
        """Decide; replicas become ready or fail, drained ones end. The fewest that were ready."""
        least = len(NODES)
        for _ in range(decisions):
            self.decide()
            ended(self)
            for each in those(self, STARTING):
                fails = (each.node, each.description) == (self.broken, "b")
                self.change(each.name, **FAILED if fails else {"phase": READY})
            ready = [each for each in those(self, READY) if each.model == "m"]
            least = min(least, len(ready))
        return least


def test_a_load_that_fails_on_one_of_three_nodes_leaves_an_old_replica_until_it_loads() -> None:
    cluster = ThreeNodes(m=replace(ONE, least=3, most=3), n=ONE)
    cluster.run(2 + REACHED_TICKS)
    others = [each for each in cluster.views.values() if each.model == "n"]
    change(cluster, description="b")
    cluster.rules = {**cluster.rules, "n": ONE}
    assert cluster.run(60) == 3
    found = {each.node: each.description for each in those(cluster, READY) if each.model == "m"}
    assert found == {"node0": "b", "node1": "b", "node2": "a"}
    assert cluster.troubles == {"m": LOAD_FAILS}
    cluster.broken = ""
    assert cluster.run(60) == 3
    assert [each.description for each in cluster.views.values() if each.model == "m"] == ["b"] * 3
    assert cluster.troubles == {}
    assert [each for each in cluster.views.values() if each.model == "n"] == others
