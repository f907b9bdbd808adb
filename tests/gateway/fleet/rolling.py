"""A cluster in memory whose model has versions and a plan, and the counts of its routers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_evidence import EvidenceNews, EvidencePart
from gateway.fleet.ray_news import RolloutAnswer, RolloutNews, RolloutRequest, RouterNews
from gateway.fleet.ray_repository import LeftOut, ModelFiles
from gateway.fleet.ray_views import ReplicaPhase
from gateway.models.model_folder import Versions
from gateway.models.replicas import ReplicaRules
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.plan import PlanStep, RolloutPlan
from gateway.rollouts.sequential_test import Counts
from tests.gateway.fleet.test_ray_controller import FakeCluster

STEPS = (
    PlanStep(weight=10, lasts="20s", min_requests=3),
    PlanStep(weight=50, lasts="20s", min_requests=3),
    PlanStep(weight=100, lasts="20s", min_requests=0),
)
PLAN = RolloutPlan(steps=STEPS, guardrails={"errors": {}})
ONE = ReplicaRules(resources={"CPU": 1})


class RollingCluster(FakeCluster):
    """The replicas of the model `m`, whose highest version they load; `stamps` has its versions."""

    def __init__(self, count: int = 1, plan: RolloutPlan | None = PLAN) -> None:
        self.stamps = {1: "a"}
        self.config = "x"
        self.plan = plan
        self.plan_refusal = ""
        self.placeless: frozenset[str] = frozenset()
        self.failing: frozenset[str] = frozenset()
        self.reason = "no such file"
        self.most = 99
        self.slow: frozenset[str] = frozenset()
        self.load_runs = 0
        """Decisions until a replica is ready."""
        self.is_removed = False
        self.config_refusal = ""
        self._loaded: dict[str, int] = {}
        self.fails_to_write = False
        self.has_ensemble = False
        super().__init__(m=replace(ONE, least=count, most=count))

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        """The files of the model without the versions that are left out."""
        rules = self.rules["m"]
        assert isinstance(rules, ReplicaRules)
        if self.is_removed:
            return {}
        if self.config_refusal:
            return {"m": self.config_refusal}
        of_model = {"m": self._files(rules, left_out)}
        if not self.has_ensemble:
            return of_model
        highest = max(self.stamps.keys() - left_out.without("e").get("m", set()))
        ensemble = replace(ONE, description=f"e{highest}")
        return {**of_model, "e": ModelFiles(rules=ensemble, selected=(1,), stamps={1: "e"})}

    def _files(self, rules: ReplicaRules, left_out: LeftOut) -> ModelFiles:
        def described(hidden: Versions) -> ReplicaRules:
            chosen = {each for each in self.stamps if each <= self.most}
            highest = max(chosen - hidden.get("m", set()), default=0)
            return replace(rules, description=f"{highest}{self.stamps.get(highest)}{self.config}")

        visible = {each for each in self.stamps if each <= self.most} - left_out.refused.get(
            "m", set()
        )
        has_candidate = "m" in left_out.candidates
        return ModelFiles(
            rules=described(left_out.without("m")),
            kept=described(left_out.without()) if has_candidate else None,
            selected=(max(visible, default=0),),
            stamps={number: each + self.config for number, each in self.stamps.items()},
            plan=self.plan,
            plan_refusal=self.plan_refusal,
            by_description=self._by_description(described) if "m" in left_out.unknown else {},
        )

    def _by_description(self, described: Callable[[Versions], ReplicaRules]) -> Mapping[str, int]:
        hidden = {number: {each for each in self.stamps if each > number} for number in self.stamps}
        return {described({"m": above}).description: n for n, above in hidden.items()}

    def write_record(self, model: str, record: bytes) -> None:
        if self.fails_to_write:
            raise InferenceError(Code.UNAVAILABLE, "GCS gone")
        super().write_record(model, record)

    def run(self, decisions: int = 1) -> None:
        """Decide; replicas become ready if they have a place and do not fail, drained ones end."""
        for _ in range(decisions):
            self.decide()
            for name, each in list(self.views.items()):
                if each.phase is ReplicaPhase.DRAINING:
                    self.remove(name)
                elif each.phase in (ReplicaPhase.STARTING, ReplicaPhase.PENDING):
                    self.begin(name, each.description)

    def begin(self, name: str, description: str) -> None:
        """Let a replica start."""
        self._loaded[name] = self._loaded.get(name, 0) + 1
        if self._loaded[name] <= self.load_runs:
            return
        if description in self.placeless:
            self.change(name, phase=ReplicaPhase.PENDING)
        elif description in self.failing:
            self.change(name, phase=ReplicaPhase.ENDED, reason=self.reason)
        elif description not in self.slow:
            self.change(name, phase=ReplicaPhase.READY)

    def rolled(self) -> "RollingCluster":
        """Have replicas that routers have reached, and then version 2."""
        self.run(6)
        self.stamps[2] = "a"
        return self

    @property
    def shown(self) -> dict[str, int]:
        """The number of replicas of each description."""
        found: dict[str, int] = {}
        for each in self.views.values():
            found[each.description] = found.get(each.description, 0) + 1
        return found

    @property
    def news(self) -> RolloutNews:
        """The rollout as routers get it."""
        return self.controller.status()[-1].rollout

    @property
    def state(self) -> tuple[str, float]:
        """The state of the rollout, and the weight that routers get."""
        shares = self.news.shares
        return str(self.news.state.get("state")), -1.0 if shares is None else shares.weight

    def ready(self, description: str) -> int:
        """The number of replicas of a description that take requests."""
        views = self.views.values()
        return sum(
            each.phase is ReplicaPhase.READY for each in views if each.description == description
        )

    def until(self, state: str, decisions: int = 60) -> None:
        """Run until the rollout is in a state."""
        for _ in range(decisions):
            if self.state[0] == state:
                return
            self.run()
        raise AssertionError(self.news.state)

    def count(self, ended: int, events: int = 0, router: str = "r", **fields: object) -> None:
        """Let a router report the requests of the candidate so far, as one block."""
        known = Counts(20, 0), Counts(ended, events)
        news = EvidenceNews(
            self.news.evidence,
            router,
            (EvidencePart(ended, 0, *known),),
            ended=ended,
            has_arrived=True,
        )
        for name, value in fields.items():
            news = type(news)(**{**_fields(news), name: value})  # type: ignore[arg-type]
        self.controller.heard.take(router, RouterNews(evidence={"m": news}))

    def ask(self, action: RolloutAction, **members: object) -> RolloutAnswer:
        """Let a person change the rollout at a router; the answer of the controller."""
        number = self.send(action, **members)
        self.run()
        return self.news.answers[number]

    def send(self, action: RolloutAction, router: str = "person", **members: object) -> str:
        """Let a router repeat a change until it sends another one; the id of the change."""
        number = f"{action}-{router}-{self.now}"
        change = RolloutRequest(number, "m", action, dict(members), "test")
        self.controller.heard.take(router, RouterNews(changes=(change,)))
        return number


def _fields(news: EvidenceNews) -> dict[str, object]:
    return {name: getattr(news, name) for name in news.__struct_fields__}
