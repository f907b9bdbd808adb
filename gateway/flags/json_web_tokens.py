"""Options of JSON Web Tokens."""

import argparse
from pathlib import Path

from gateway.errors import Code, InferenceError
from gateway.flags.values import natural
from gateway.policy.key_set_url import KeySetUrl, is_url, read_url
from gateway.policy.token_rules import JwtSettings, TokenRules

KEY_SET = "--jwt-jwks"
TENANT, ROLES, LEEWAY = "--jwt-tenant-claim", "--jwt-roles-claim", "--jwt-leeway-secs"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("JSON Web Tokens")
    defaults = TokenRules(issuer="", audience="")
    group.add_argument(
        KEY_SET,
        type=key_set,
        metavar="FILE|URL",
        help="JWK set with the keys of the issuer: a file, which is read again after a change, or "
        "an https URL, which is fetched each 5 minutes; requests need a token in Authorization, or "
        "an API key of --api-keys (default: none, needs --jwt-issuer and --jwt-audience)",
    )
    group.add_argument(
        "--jwt-issuer", type=text, metavar="TEXT", help="the claim iss of tokens (default: none)"
    )
    group.add_argument(
        "--jwt-audience",
        type=text,
        metavar="TEXT",
        help="a value of the claim aud of tokens (default: none)",
    )
    group.add_argument(
        TENANT,
        type=text,
        metavar="NAME",
        help=f"claim with the tenant (default: {', else '.join(defaults.tenant_claims)})",
    )
    group.add_argument(
        ROLES,
        type=text,
        metavar="NAME",
        help="claim with the roles, a list or a text with spaces "
        f"(default: {', else '.join(defaults.roles_claims)})",
    )
    group.add_argument(
        LEEWAY,
        type=natural,
        metavar="SECS",
        help="allowed difference between the clocks of issuer and server (seconds, default: "
        f"{defaults.leeway_secs:g})",
    )


def jwt_settings(flags: argparse.Namespace) -> JwtSettings | None:
    """Settings from the parsed options; INVALID_ARG if some of them lack others."""
    required = {
        KEY_SET: flags.jwt_jwks,
        "--jwt-issuer": flags.jwt_issuer,
        "--jwt-audience": flags.jwt_audience,
    }
    refining = {
        TENANT: flags.jwt_tenant_claim,
        ROLES: flags.jwt_roles_claim,
        LEEWAY: flags.jwt_leeway_secs,
    }
    given = [name for name, value in {**required, **refining}.items() if value is not None]
    missing = [name for name, value in required.items() if value is None]
    if not given:
        return None
    if missing:
        raise InferenceError(Code.INVALID_ARG, f"{given[0]} needs {' and '.join(missing)}, too")
    return JwtSettings(key_set=flags.jwt_jwks, rules=_rules(flags))


def _rules(flags: argparse.Namespace) -> TokenRules:
    defaults = TokenRules(issuer=flags.jwt_issuer, audience=flags.jwt_audience)
    tenant, roles, leeway = flags.jwt_tenant_claim, flags.jwt_roles_claim, flags.jwt_leeway_secs
    return TokenRules(
        issuer=defaults.issuer,
        audience=defaults.audience,
        tenant_claims=defaults.tenant_claims if tenant is None else (tenant,),
        roles_claims=defaults.roles_claims if roles is None else (roles,),
        leeway_secs=defaults.leeway_secs if leeway is None else leeway,
    )


def text(value: str) -> str:
    """A text that is not empty."""
    if value:
        return value
    raise argparse.ArgumentTypeError("it is empty, expected a text")


def key_set(value: str) -> Path | KeySetUrl:
    """The place of a key set: a file, or a URL."""
    if not is_url(value):
        return Path(text(value))
    try:
        return read_url(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
