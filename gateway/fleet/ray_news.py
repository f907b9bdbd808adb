"""The news between routers and the controller on Ray: needs, offers, and reasons of a lack."""

import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from gateway.fleet.offers import ModelOffer

KEPT_SECS = 10.0
"""The needs of a router hold for this time; it repeats them every second."""

OffersByModel = Mapping[str, tuple[ModelOffer, ...]]
"""Every version of some models."""


class ModelNews(msgspec.Struct, frozen=True):
    """A model of the controller: why no replica of it can start, "" if one may.

    `known` is the digest of the offers that the controller has, "" without any.
    """

    refusal: str = ""
    known: str = ""


class RouterNews(msgspec.Struct, frozen=True):
    """The needs of the requests that wait in a router, and offers that the controller lacks."""

    needs: Mapping[str, float] = {}
    offers: OffersByModel = {}


read_news = msgspec.json.Decoder(RouterNews).decode
read_known = msgspec.json.Decoder(OffersByModel).decode


def described(offers: Sequence[ModelOffer]) -> str:
    """The digest of the offers of a model."""
    found = blake2b(digest_size=16)
    for each in offers:
        found.update(b"%d" % each.version + each.digests.whole)
    return found.hexdigest() if offers else ""


class HeardNews:
    """The last news of every router, in absolute values; others repeat what a restart forgets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.offers: OffersByModel = {}
        self._clock = clock
        self._began_at = clock()
        self._needs: Mapping[str, tuple[float, Mapping[str, float]]] = {}

    def take(self, router: str, news: RouterNews) -> None:
        """Take the news of a router; `decide` reads them in another thread."""
        now = self._clock()
        kept = {name: each for name, each in self._needs.items() if each[0] > now}
        self._needs = {**kept, router: (now + KEPT_SECS, news.needs)}
        self.offers = {**self.offers, **news.offers}

    def need(self, model: str) -> float:
        """The need of the requests that wait in routers."""
        now = self._clock()
        return sum(needs.get(model, 0.0) for until, needs in self._needs.values() if until > now)

    def lacks(self, model: str) -> bool:
        """Whether no router knows the model: after a restart all have the time to tell."""
        return model not in self.offers and self._clock() >= self._began_at + KEPT_SECS

    def known(self, model: str) -> str:
        """The digest of the offers of a model."""
        return described(self.offers.get(model, ()))
