"""Callers with JSON Web Tokens: one for each token, until the token expires or its key is gone."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.policy import json_web_tokens
from gateway.policy.caller import Caller
from gateway.policy.json_web_tokens import JsonWebTokens
from gateway.policy.key_set import VerificationKey
from gateway.policy.token_rules import TokenRules
from tests.builders import soon
from tests.issuer import AUDIENCE, ISSUER, HeldKeys, SigningKey

RULES = TokenRules(issuer=ISSUER, audience=AUDIENCE, leeway_secs=0)
EC, RSA, ED = SigningKey("ec"), SigningKey("rsa", "RS256"), SigningKey("ed", "EdDSA")


@pytest.fixture
def source() -> HeldKeys:
    return HeldKeys(EC, RSA, ED)


@pytest.fixture
def tokens(source: HeldKeys) -> JsonWebTokens:
    return JsonWebTokens(RULES, source)


def find(tokens: JsonWebTokens, token: str) -> Caller | None:
    return tokens.find(token.encode(), time.time())


def caller(tokens: JsonWebTokens, token: str) -> Caller:
    found = find(tokens, token)
    assert found is not None
    return found


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The names of the keys that have verified signatures."""
    found: list[str | None] = []
    verifies = VerificationKey.verifies

    def counted(self: VerificationKey, *given: Any) -> bool:
        found.append(self.kid)
        return verifies(self, *given)

    monkeypatch.setattr(VerificationKey, "verifies", counted)
    return found


def test_a_token_is_verified_once_and_has_one_caller(
    tokens: JsonWebTokens, verified: list[str | None]
) -> None:
    first, other = EC.token(), ED.token()
    callers = [caller(tokens, each) for each in (first, first, other, first)]
    assert verified == ["ec", "ed"]
    assert callers[0] is callers[1] is callers[3]
    assert callers[2] is not callers[0]


def test_tokens_that_have_expired_or_are_for_others_are_refused_without_a_signature(
    tokens: JsonWebTokens, verified: list[str | None]
) -> None:
    refused: list[dict[str, Any]] = [{"exp": 1}, {"iss": "other"}, {"aud": "other"}, {"tenant": ""}]
    for claims in refused:
        assert find(tokens, EC.token(**claims)) is None
    assert find(tokens, EC.token({"kid": "other"})) is None
    assert verified == []


def test_a_forged_token_is_verified_once_for_each_key_that_it_names(
    tokens: JsonWebTokens,
    source: HeldKeys,
    verified: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_FORGED", 2)
    new = SigningKey("ec")
    token, others = new.token(), [SigningKey("ec").token() for _ in range(2)]
    assert [find(tokens, token) for _ in range(3)] == [None] * 3
    assert verified == ["ec"]
    for other in others:
        find(tokens, other)
    assert [find(tokens, each) for each in (*others, token)] == [None] * 3
    assert verified == ["ec"] * 4
    source.change(new, RSA)
    assert find(tokens, token) is not None
    assert len(verified) == 5


def test_a_verified_token_is_refused_once_it_expires(tokens: JsonWebTokens) -> None:
    expires = int(time.time()) + 60
    token = EC.token(exp=expires).encode()
    assert tokens.find(token, expires - 0.001) is not None
    assert tokens.find(token, expires) is None
    assert tokens.find(token, expires + 1) is None


def test_the_oldest_verified_tokens_are_dropped_beyond_the_limit(
    tokens: JsonWebTokens, verified: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_VERIFIED", 3)
    given = [EC.token(n=n) for n in range(5)]
    for token in given:
        find(tokens, token)
        assert tokens.count <= 3
    verified.clear()
    for token in given[2:]:
        find(tokens, token)
    assert verified == []
    find(tokens, given[0])
    assert (verified, tokens.count) == (["ec"], 3)


def test_a_dropped_token_has_its_caller_again_while_that_is_in_use(
    tokens: JsonWebTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_VERIFIED", 1)
    token, other = EC.token(n=1), EC.token(n=2)
    held = caller(tokens, token)
    find(tokens, other)
    assert caller(tokens, token) is held


# The end of callers.


@asynccontextmanager
async def followed(tokens: JsonWebTokens) -> AsyncIterator[asyncio.Event]:
    """A task follows the keys; the event is set when callers are no longer valid."""
    called = asyncio.Event()
    following = asyncio.create_task(tokens.follow(called.set))
    try:
        yield called
    finally:
        following.cancel()
        await asyncio.wait([following])
        assert following.cancelled()


async def test_callers_end_with_their_key_and_others_do_not(
    tokens: JsonWebTokens, source: HeldKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_VERIFIED", 2)
    given = [EC.token(n=1), EC.token(n=2), ED.token(), RSA.token()]
    ended, also_ended, kept, other = (caller(tokens, each) for each in given)
    async with followed(tokens) as called:
        source.change(RSA, ED, SigningKey("new"))
        await soon(called.wait())
        assert (ended.valid, also_ended.valid) == (False, False)
        assert (kept.valid, other.valid) == (True, True)
        assert [find(tokens, each) is None for each in given] == [True, True, False, False]
        assert caller(tokens, given[2]) is kept
        called.clear()
        source.change(RSA, SigningKey("ed", "EdDSA"))
        await soon(called.wait())
        assert (kept.valid, other.valid) == (False, True)
        assert find(tokens, given[2]) is None
        called.clear()
        source.change(RSA, ED, EC)
        again = caller(tokens, given[0])
        assert again.valid
        assert again is not ended
        await asyncio.sleep(0.05)
        assert not called.is_set()


async def test_callers_end_when_their_token_expires(
    tokens: JsonWebTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "LOOK_SECS", 0.005)
    expires = time.time() + 0.2
    ended, kept = (
        tokens.find(EC.token(exp=expires).encode(), expires - 0.1),
        caller(tokens, EC.token()),
    )
    assert ended is not None
    async with followed(tokens) as called:
        await soon(called.wait())
        assert time.time() >= expires
        assert (ended.valid, kept.valid) == (False, True)
        called.clear()
        await asyncio.sleep(0.05)
        assert not called.is_set()


def test_callers_without_requests_are_freed(
    tokens: JsonWebTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_VERIFIED", 10)
    for number in range(30):
        find(tokens, EC.token(n=number))
    gc.collect()
    kinds = [type(each).__name__ for each in gc.get_objects()]
    assert kinds.count("TokenCaller") <= 10 + 1


def test_failures_are_those_of_the_source(tokens: JsonWebTokens, source: HeldKeys) -> None:
    assert tokens.failures is source.failures
