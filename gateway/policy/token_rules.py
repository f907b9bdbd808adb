"""Rules for JSON Web Tokens: the claims that a token needs, and those of its tenant and roles."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from gateway.policy.key_set_url import KeySetUrl
from gateway.policy.keys import NAME, Role

Claims = Mapping[str, Any]
LATEST = ("iat", "nbf")
"""Claims with times that have passed (RFC 7519, 4.1.5 and 4.1.6)."""
ROLES: Mapping[str, Role] = {each.value: each for each in Role}


class TokenOwner(NamedTuple):
    """The owner of a token, which `expires` at a time in seconds of the Unix epoch."""

    tenant: str
    roles: frozenset[Role]
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The issuer and the audience of all tokens, and the names of claims.

    Of `tenant_claims` and of `roles_claims` the first that a token has counts. `leeway_secs` is
    the allowed difference between the clocks of issuer and server.
    """

    issuer: str
    audience: str
    tenant_claims: tuple[str, ...] = ("tenant", "azp")
    roles_claims: tuple[str, ...] = ("roles", "scope")
    leeway_secs: float = 30.0

    def owner(self, claims: Claims, now: float) -> TokenOwner | None:
        """The owner of a token with these claims; None if the token is not valid.

        `iss`, `aud` and `exp` are required (RFC 7519, 4.1), and times are numbers (section 2).
        """
        if claims.get("iss") != self.issuer or self.audience not in _texts(claims.get("aud")):
            return None
        times = {name: _time(claims[name]) for name in (*LATEST, "exp") if name in claims}
        expires = times.pop("exp", None)
        if expires is None or now >= expires + self.leeway_secs:
            return None
        if any(each is None or each > now + self.leeway_secs for each in times.values()):
            return None
        tenant = _first(claims, self.tenant_claims)
        if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
            return None
        roles = _roles(_first(claims, self.roles_claims))
        return TokenOwner(tenant, frozenset(roles), expires + self.leeway_secs)


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtSettings:
    """JSON Web Tokens; `key_set` is the place of the issuer's keys."""

    key_set: Path | KeySetUrl
    rules: TokenRules


def _texts(value: Any) -> list[Any]:
    """The texts of `aud`: one, or a list."""
    return value if isinstance(value, list) else [value]


def _time(value: Any) -> float | None:
    """A NumericDate (RFC 7519, 2); None if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None


def _first(claims: Claims, names: Iterable[str]) -> Any:
    """The value of the first claim that is there, None for none."""
    return next((claims[name] for name in names if name in claims), None)


def _roles(value: Any) -> Iterable[Role]:
    """The known roles of a list, or of a text with spaces as in `scope` (RFC 6749, 3.3)."""
    names = value.split(" ") if isinstance(value, str) else value
    if isinstance(names, list):
        yield from (ROLES[each] for each in names if isinstance(each, str) and each in ROLES)
