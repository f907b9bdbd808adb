"""The news between routers and the controller on Ray: needs, offers, and reasons of a lack."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from gateway.errors import Code
from gateway.fleet.offers import Key, ModelOffer
from gateway.fleet.ray_evidence import EvidenceNews
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.rollout import Transition

KEPT_SECS = 10.0
"""The needs of a router hold for this time; it repeats them every second."""

OffersByModel = Mapping[str, tuple[ModelOffer, ...]]
"""Every version of some models."""


class Shares(NamedTuple):
    """The share of the candidate in the requests of two versions, in percent, and their keys."""

    stable: int
    candidate: int
    weight: float
    keys: tuple[str, ...] = ()
    salt: str = ""


class RolloutAnswer(msgspec.Struct, frozen=True):
    """The answer to a request to change a rollout: the error, "" without one, and its code."""

    error: str = ""
    code: Code = Code.UNKNOWN


class RolloutNews(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a model at the controller: `state` and `history` for readers.

    `shares` are those of requests without a version, None once they follow Triton's rule. Routers
    count for `evidence`, if it is not "", by the `guardrails` of the plan; `heard` is the last part
    of each of them. `answers` are those to the latest requests.
    """

    state: dict[str, Any] = {}
    history: tuple[Transition, ...] = ()
    shares: Shares | None = None
    is_open: bool = False
    evidence: str = ""
    guardrails: dict[str, Any] = {}
    heard: Mapping[str, int] = {}
    answers: Mapping[str, RolloutAnswer] = {}


class RolloutRequest(msgspec.Struct, frozen=True):
    """A request of a person to change the rollout of a model; a router repeats it by its id."""

    id: str
    model: str
    action: RolloutAction
    members: dict[str, Any]
    by: str


class ModelNews(msgspec.Struct, frozen=True):
    """A model of the controller: why no replica of it can start, "" if one may.

    `description` is the one that is wanted, `known` the digest of the offers that the controller
    has of it, "" without any.
    """

    refusal: str = ""
    known: str = ""
    description: str = ""
    rollout: RolloutNews = RolloutNews()


class RouterNews(msgspec.Struct, frozen=True):
    """The needs of the requests that wait in a router, and offers that the controller lacks.

    `descriptions` are those of the models with offers. `evidence` has the counts of rollouts, by
    model, and `changes` are requests without an answer.
    """

    needs: Mapping[str, float] = {}
    offers: OffersByModel = {}
    descriptions: Mapping[str, str] = {}
    evidence: Mapping[str, EvidenceNews] = {}
    changes: tuple[RolloutRequest, ...] = ()


read_news = msgspec.json.Decoder(RouterNews).decode
read_known = msgspec.json.Decoder(OffersByModel).decode


def described(offers: Sequence[ModelOffer]) -> str:
    """The digest of the offers of a model."""
    found = blake2b(digest_size=16)
    for each in offers:
        found.update(b"%d" % each.version + each.digests.whole)
    return found.hexdigest() if offers else ""


def router_news(
    needs: Mapping[str, float], models: Mapping[str, ModelNews], offers: Iterable[ModelOffer]
) -> RouterNews:
    """The news of a router with offers of the wanted descriptions; `models` has the controller's.

    Of several offers of a version that of the latest load counts, so that all routers agree.
    """
    latest: dict[Key, ModelOffer] = {}
    for offer in offers:
        other = latest.setdefault(offer.key, offer)
        if (offer.loaded_at, offer.config) > (other.loaded_at, other.config):
            latest[offer.key] = offer
    found: dict[str, tuple[ModelOffer, ...]] = {}
    for name, version in sorted(latest):
        found[name] = (*found.get(name, ()), latest[name, version])
    lacking = {
        name: of_model
        for name, of_model in found.items()
        if name in models and described(of_model) != models[name].known
    }
    return RouterNews(needs, lacking, {name: models[name].description for name in lacking})


class HeardNews:
    """The last news of every router, in absolute values; others repeat what a restart forgets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.offers: OffersByModel = {}
        self._clock = clock
        self._began_at = clock()
        self._news: Mapping[str, tuple[float, RouterNews]] = {}
        self._descriptions: Mapping[str, str] = {}

    def take(self, router: str, news: RouterNews) -> None:
        """Take the news of a router; `decide` reads them in another thread."""
        now = self._clock()
        kept = {name: each for name, each in self._news.items() if each[0] > now}
        self._news = {**kept, router: (now + KEPT_SECS, news)}
        self.offers = {**self.offers, **news.offers}
        self._descriptions = {**self._descriptions, **news.descriptions}

    def need(self, model: str) -> float:
        """The need of the requests that wait in routers."""
        return sum(each.needs.get(model, 0.0) for each in self._latest())

    def evidence(self, model: str, evidence: str) -> list[EvidenceNews]:
        """The counts of routers for an evidence of a model."""
        found = [each.evidence[model] for each in self._latest() if model in each.evidence]
        return [each for each in found if each.evidence == evidence]

    def changes(self) -> list[RolloutRequest]:
        """The requests of all routers to change rollouts."""
        return [change for each in self._latest() for change in each.changes]

    def lacks(self, model: str, description: str) -> bool:
        """Whether no router knows a description: after a restart all have the time to tell."""
        is_over = self._clock() >= self._began_at + KEPT_SECS
        return is_over and self._descriptions.get(model) != description

    def known(self, model: str, description: str) -> str:
        """The digest of the offers of a description, "" without any."""
        is_other = self._descriptions.get(model) != description
        return "" if is_other else described(self.offers.get(model, ()))

    def _latest(self) -> list[RouterNews]:
        now = self._clock()
        return [news for until, news in self._news.values() if until > now]
