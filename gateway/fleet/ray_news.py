"""The news between routers and the controller on Ray: needs, offers, and reasons of a lack."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from gateway.fleet.offers import Key, ModelOffer

KEPT_SECS = 10.0
"""The needs of a router hold for this time; it repeats them every second."""

OffersByModel = Mapping[str, tuple[ModelOffer, ...]]
"""Every version of some models."""


class ModelNews(msgspec.Struct, frozen=True):
    """A model of the controller: why no replica of it can start, "" if one may.

    `description` is the one that is wanted, `known` the digest of the offers that the controller
    has of it, "" without any.
    """

    refusal: str = ""
    known: str = ""
    description: str = ""


class RouterNews(msgspec.Struct, frozen=True):
    """The needs of the requests that wait in a router, and offers that the controller lacks.

    `descriptions` are those of the models with offers.
    """

    needs: Mapping[str, float] = {}
    offers: OffersByModel = {}
    descriptions: Mapping[str, str] = {}


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
        self._needs: Mapping[str, tuple[float, Mapping[str, float]]] = {}
        self._descriptions: Mapping[str, str] = {}

    def take(self, router: str, news: RouterNews) -> None:
        """Take the news of a router; `decide` reads them in another thread."""
        now = self._clock()
        kept = {name: each for name, each in self._needs.items() if each[0] > now}
        self._needs = {**kept, router: (now + KEPT_SECS, news.needs)}
        self.offers = {**self.offers, **news.offers}
        self._descriptions = {**self._descriptions, **news.descriptions}

    def need(self, model: str) -> float:
        """The need of the requests that wait in routers."""
        now = self._clock()
        return sum(needs.get(model, 0.0) for until, needs in self._needs.values() if until > now)

    def lacks(self, model: str, description: str) -> bool:
        """Whether no router knows a description: after a restart all have the time to tell."""
        is_over = self._clock() >= self._began_at + KEPT_SECS
        return is_over and self._descriptions.get(model) != description

    def known(self, model: str, description: str) -> str:
        """The digest of the offers of a description, "" without any."""
        is_other = self._descriptions.get(model) != description
        return "" if is_other else described(self.offers.get(model, ()))
