"""Options of JSON Web Tokens: those that belong together, and their values."""

import argparse
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import serve as flags
from gateway.policy.key_set_url import read_url
from gateway.policy.token_rules import JwtSettings, TokenRules

ALL = ("--jwt-jwks=keys.json", "--jwt-issuer=https://a.example", "--jwt-audience=sluice")


def parse(*arguments: str) -> JwtSettings | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    return flags.settings(parser.parse_args(["--model-repository", "models", *arguments])).jwt


def test_tokens_are_not_accepted_by_default() -> None:
    assert parse() is None
    assert parse("--api-keys=keys.toml") is None


def test_the_three_options_are_enough() -> None:
    rules = TokenRules(
        issuer="https://a.example",
        audience="sluice",
        tenant_claims=("tenant", "azp"),
        roles_claims=("roles", "scope"),
        leeway_secs=30,
    )
    assert parse(*ALL) == JwtSettings(key_set=Path("keys.json"), rules=rules)


def test_claims_and_the_leeway_can_be_chosen() -> None:
    found = parse(*ALL, "--jwt-tenant-claim=org", "--jwt-roles-claim=groups", "--jwt-leeway-secs=0")
    assert found is not None
    assert found.rules == TokenRules(
        issuer="https://a.example",
        audience="sluice",
        tenant_claims=("org",),
        roles_claims=("groups",),
        leeway_secs=0,
    )


def test_the_keys_may_be_behind_a_url() -> None:
    url = "https://a.example/keys"
    found = parse(f"--jwt-jwks={url}", *ALL[1:])
    assert found is not None
    assert found.key_set == read_url(url)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (ALL[:1], "--jwt-jwks needs --jwt-issuer and --jwt-audience, too"),
        (ALL[1:2], "--jwt-issuer needs --jwt-jwks and --jwt-audience, too"),
        (ALL[2:], "--jwt-audience needs --jwt-jwks and --jwt-issuer, too"),
        (ALL[:2], "--jwt-jwks needs --jwt-audience, too"),
        (ALL[1:], "--jwt-issuer needs --jwt-jwks, too"),
        (
            ["--jwt-leeway-secs=0"],
            "--jwt-leeway-secs needs --jwt-jwks and --jwt-issuer and --jwt-audience, too",
        ),
    ],
)
def test_one_without_the_others_is_refused_with_those_that_are_missing(
    arguments: list[str], text: str
) -> None:
    with pytest.raises(InferenceError) as refused:
        parse(*arguments)
    assert refused.value.message == text


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--jwt-jwks=", "it is empty, expected a text"),
        ("--jwt-issuer=", "it is empty, expected a text"),
        ("--jwt-audience=", "it is empty, expected a text"),
        ("--jwt-tenant-claim=", "it is empty, expected a text"),
        ("--jwt-roles-claim=", "it is empty, expected a text"),
        ("--jwt-leeway-secs=-1", "'-1': expected a whole number of at least 0"),
        ("--jwt-leeway-secs=1.5", "'1.5': expected a whole number of at least 0"),
        ("--jwt-jwks=http://a.example/k", "its scheme is http and its host 'a.example', expected"),
        ("--jwt-jwks=file:///keys.json", "it is no URL"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found(argument: str, text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=text):
        parse(*ALL, argument)
