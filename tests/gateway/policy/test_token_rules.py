"""Rules for tokens: each claim that must be there, times at their limits, tenant and roles."""

import math
from typing import Any

import pytest

from gateway.policy.keys import Role
from gateway.policy.token_rules import TokenOwner, TokenRules

NOW = 1_800_000_000.0
RULES = TokenRules(issuer="https://a.example", audience="sluice", leeway_secs=30)
CLAIMS: dict[str, Any] = {
    "iss": "https://a.example",
    "aud": "sluice",
    "exp": NOW + 60,
    "tenant": "team",
    "roles": ["infer"],
}
INFER = frozenset({Role.INFER})
ABSENT = object()


def owner(rules: TokenRules = RULES, **claims: Any) -> TokenOwner | None:
    given = {**CLAIMS, **claims}
    return rules.owner({name: value for name, value in given.items() if value is not ABSENT}, NOW)


def test_a_token_is_that_of_its_tenant_until_the_leeway_after_exp_is_over() -> None:
    assert owner() == TokenOwner("team", INFER, NOW + 90)


@pytest.mark.parametrize(
    "claims",
    [
        *({name: ABSENT} for name in ("iss", "aud", "exp", "tenant")),
        *({name: None} for name in ("iss", "aud", "exp", "nbf", "iat", "tenant")),
        *({"iss": value} for value in ("", "https://a.example/", "https://b.example", "a.example")),
        {"iss": ["https://a.example"]},
        *({"aud": value} for value in ("", "sluices", "sluic", [], ["other"], [["sluice"]], 1)),
        {"aud": {"sluice": True}},
        *({"exp": value} for value in ("1900000000", True, [], {}, math.inf, math.nan)),
        *({name: value} for name in ("nbf", "iat") for value in (str(NOW), True)),
        *({"tenant": value} for value in ("", "a b", "-a", "a/b", "a" * 65, "é", 5, ["team"], {})),
    ],
)
def test_a_token_with_another_or_a_malformed_claim_is_not_valid(claims: dict[str, Any]) -> None:
    assert owner(**claims) is None


@pytest.mark.parametrize("audience", ["sluice", ["other", "sluice"], [5, "sluice"]])
def test_the_audience_is_one_of_those_of_the_token(audience: Any) -> None:
    assert owner(aud=audience) is not None


def test_times_hold_with_the_leeway() -> None:
    assert owner(exp=math.nextafter(NOW - 30, NOW)) is not None
    assert owner(exp=NOW - 30) is None
    for name in ("nbf", "iat"):
        assert owner(**{name: NOW + 30}) is not None
        assert owner(**{name: NOW + 31}) is None
        assert owner(**{name: 0}) is not None


@pytest.mark.parametrize(
    ("claims", "tenant"),
    [
        ({"azp": "client"}, "team"),
        ({"tenant": ABSENT, "azp": "client"}, "client"),
        ({"tenant": ABSENT, "sub": "user"}, None),
        ({"tenant": "a b", "azp": "client"}, None),
    ],
)
def test_the_tenant_is_that_of_the_first_claim_which_is_there(
    claims: dict[str, Any], tenant: str | None
) -> None:
    found = owner(**claims)
    assert (None if found is None else found.tenant) == tenant


@pytest.mark.parametrize(
    ("claims", "roles"),
    [
        ({"roles": ["infer", "admin", "root", 5, None, ["observe"]]}, {"infer", "admin"}),
        ({"roles": "openid observe infer"}, {"observe", "infer"}),
        ({"roles": "Infer"}, set()),
        ({"roles": []}, set()),
        ({"roles": [], "scope": "admin"}, set()),
        ({"roles": {"infer": True}}, set()),
        ({"roles": None}, set()),
        ({"roles": ABSENT}, set()),
        ({"roles": ABSENT, "scope": "openid admin"}, {"admin"}),
        ({"roles": ABSENT, "scope": ["observe"]}, {"observe"}),
    ],
)
def test_the_roles_are_the_known_ones_of_a_list_or_of_a_text(
    claims: dict[str, Any], roles: set[str]
) -> None:
    found = owner(**claims)
    assert found is not None
    assert found.roles == roles


def test_other_claims_may_have_the_tenant_and_the_roles() -> None:
    rules = TokenRules(
        issuer=RULES.issuer,
        audience=RULES.audience,
        tenant_claims=("sub",),
        roles_claims=("groups",),
    )
    found = owner(rules, sub="user", groups=["admin"])
    assert found is not None
    assert (found.tenant, found.roles) == ("user", {Role.ADMIN})
    assert owner(rules) is None
