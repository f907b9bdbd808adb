"""Accounts of tenants: what their requests cost, and how many there are."""

from typing import Protocol

from gateway.errors import InferenceError
from gateway.messages import Usage


class LimitsAccount(Protocol):
    """The account of a request whose tenant has limits."""

    def wasted(self, usage: Usage) -> None:
        """The engine has made tokens after the end."""

    def ended(self, error: InferenceError | None) -> None:
        """The request has ended. Its record has its tokens, and has not counted the end yet."""


class TokenReader(Protocol):
    """Gets the tokens of a request behind a fair queue as they are made."""

    def counted(self, usage: Usage | None) -> None:
        """The record has counted further tokens; `usage` is that of the response, if it has one."""

    def wasted(self, usage: Usage) -> None:
        """The engine has made tokens after the end."""


class TenantsInFlight(dict[str, int]):
    """The requests of each tenant that have not ended, wherever they are."""

    def ended(self, tenant: str) -> None:
        """Count a request no more."""
        left = self[tenant] - 1
        if left:
            self[tenant] = left
        else:
            del self[tenant]
