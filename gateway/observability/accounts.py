"""Accounts of tenants: what their requests cost, and how many there are."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gateway.errors import InferenceError
from gateway.messages import Phases, Usage


class LimitsAccount(Protocol):
    """The account of a request whose tenant has limits."""

    def wasted(self, usage: Usage) -> None:
        """The engine has made tokens after the end."""

    def ended(self, record: Any, error: InferenceError | None) -> None:
        """The request of a `Record` has ended: that has its tokens, and has not counted the end."""


class TokenReader(Protocol):
    """Gets the service of a request behind a fair queue, which a `Record` names, as it is made."""

    @property
    def noted(self) -> Sequence[Any]:
        """The records that it reads later, in the order of their begins and ends.

        If the last ones are those of an execution, it reads that there, without a call.
        """

    def counted(self, record: Any, usage: Usage | None) -> None:
        """The record has counted further tokens; `usage` is that of the response, if it has one."""

    def executed(self, record: Any, phases: Phases, rows: int) -> None:
        """An execution with that many rows has ended."""

    def freed(self, record: Any) -> None:
        """Its instance takes another request before this one ends."""

    def wasted(self, usage: Usage) -> None:
        """The engine has made tokens after the end."""


class PassingReader(TokenReader, Protocol):
    """That of requests that pass the fair queue."""

    def take(self, count: int) -> None:
        """The one that was noted last takes the places of as many further ones."""


class Passing(LimitsAccount, Protocol):
    """The account of requests that pass: it gets their records, first at their begin, by `note`.

    It is `now` for the one that begins.
    """

    now: float
    note: Callable[[Any], None]

    @property
    def passage(self) -> PassingReader:
        """The reader of their records."""


class TenantsInFlight(dict[str, int]):
    """The requests of each tenant that have not ended, wherever they are."""

    def ended(self, tenant: str) -> None:
        """Count a request no more."""
        left = self[tenant] - 1
        if left:
            self[tenant] = left
        else:
            del self[tenant]
