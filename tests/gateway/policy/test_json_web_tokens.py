"""JSON Web Tokens: those that are verified, and forged and malformed ones that are not."""

import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.policy.caller import Caller
from gateway.policy.json_web_tokens import MAX_TOKEN_BYTES, JsonWebTokens
from gateway.policy.keys import Role
from gateway.policy.token_rules import TokenRules
from tests.issuer import AUDIENCE, ISSUER, HeldKeys, SigningKey, valid_claims

RULES = TokenRules(issuer=ISSUER, audience=AUDIENCE, leeway_secs=0)
EC, RSA, ED = SigningKey("ec"), SigningKey("rsa", "RS256"), SigningKey("ed", "EdDSA")
STRANGER = SigningKey("ec")


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


def encoded(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def signed_by_ec(header: Any, payload: Any) -> str:
    """A token of any parts with a good signature."""
    parts = f"{encoded(header)}.{encoded(payload)}"
    signature = jwt.get_algorithm_by_name("ES256").sign(parts.encode(), EC.private)
    return f"{parts}.{encoded(signature)}"


def signed_by_hmac(secret: bytes, **header: Any) -> str:
    parts = f"{encoded({'typ': 'JWT', **header})}.{encoded(valid_claims())}"
    return f"{parts}.{encoded(hmac.digest(secret, parts.encode(), hashlib.sha256))}"


def public_of(key: SigningKey, encoding: Encoding) -> bytes:
    found: bytes = key.private.public_key().public_bytes(
        encoding, PublicFormat.SubjectPublicKeyInfo
    )
    return found


@pytest.mark.parametrize("key", [EC, RSA, ED])
def test_a_token_that_a_key_of_the_set_signed_has_its_tenant_and_roles(
    tokens: JsonWebTokens, key: SigningKey
) -> None:
    found = caller(tokens, key.token(roles=["infer", "admin", "other"]))
    assert (found.tenant, found.key_id, found.valid) == ("team", "", True)
    assert found.roles == {Role.INFER, Role.ADMIN}
    assert not found.local


def test_keys_in_headers_of_a_token_are_ignored(tokens: JsonWebTokens) -> None:
    headers = {"jku": "http://x", "x5u": "http://x", "jwk": STRANGER.jwk(), "x5c": ["AA"]}
    assert find(tokens, EC.token(headers)) is not None
    assert find(tokens, STRANGER.token(headers)) is None


def test_a_token_without_a_kid_has_the_only_key_that_fits(source: HeldKeys) -> None:
    tokens = JsonWebTokens(RULES, source)
    claims = valid_claims()
    nameless = jwt.encode(claims, EC.private, algorithm="ES256")
    assert find(tokens, nameless) is not None
    source.change(EC, SigningKey("other"))
    assert find(JsonWebTokens(RULES, source), nameless) is None


def changed(token: str, part: int, change: Callable[[str], str]) -> str:
    parts = token.split(".")
    parts[part] = change(parts[part])
    return ".".join(parts)


def payload_of(**claims: Any) -> str:
    return encoded({**valid_claims(), **claims})


GOOD = EC.token(exp=4_000_000_000)
HEADER = {"alg": "ES256", "kid": "ec"}
CLAIMS = {**valid_claims(), "exp": 4_000_000_000}
NESTED = b'{"a":' * 3000 + b"1" + b"}" * 3000

FORGED: Mapping[str, str] = {
    "none, without a signature": f"{encoded({'alg': 'none'})}.{payload_of()}.",
    "none, with a kid": f"{encoded({'alg': 'none', 'kid': 'ec'})}.{payload_of()}.",
    "none, with a signature": signed_by_ec({"alg": "none", "kid": "ec"}, CLAIMS),
    "None": signed_by_ec({"alg": "None", "kid": "ec"}, CLAIMS),
    "no alg": signed_by_ec({"kid": "ec"}, CLAIMS),
    "alg a list": signed_by_ec({"alg": ["ES256"], "kid": "ec"}, CLAIMS),
    "HS256 by the public key in PEM": signed_by_hmac(
        public_of(RSA, Encoding.PEM), alg="HS256", kid="rsa"
    ),
    "HS256 by the public key in DER": signed_by_hmac(
        public_of(RSA, Encoding.DER), alg="HS256", kid="rsa"
    ),
    "HS256 by the public key, without a kid": signed_by_hmac(
        public_of(RSA, Encoding.PEM), alg="HS256"
    ),
    "HS256 by nothing": signed_by_hmac(b"", alg="HS256", kid="ec"),
    "HS256 named RS256": signed_by_hmac(public_of(RSA, Encoding.PEM), alg="RS256", kid="rsa"),
    "another key with the kid": STRANGER.token(),
    "another type of key": signed_by_ec({"alg": "ES256", "kid": "rsa"}, CLAIMS),
    "another algorithm": signed_by_ec({"alg": "ES384", "kid": "ec"}, CLAIMS),
    "RS256 named PS256": changed(RSA.token(), 0, lambda _: encoded({"alg": "PS256", "kid": "rsa"})),
    "a kid of nothing": EC.token({"kid": "other"}),
    "a kid that is a path": EC.token({"kid": "../../../../dev/null"}),
    "an empty kid": EC.token({"kid": ""}),
    "a kid that is a number": signed_by_ec({"alg": "ES256", "kid": 1}, CLAIMS),
    "a kid that is a list": signed_by_ec({"alg": "ES256", "kid": ["ec"]}, CLAIMS),
    "an unknown crit": signed_by_ec({**HEADER, "crit": ["x"], "x": 1}, CLAIMS),
    "a crit of PyJWT": signed_by_ec({**HEADER, "crit": ["b64"], "b64": True}, CLAIMS),
    "an empty crit": signed_by_ec({**HEADER, "crit": []}, CLAIMS),
    "another issuer": EC.token(iss="https://other.example"),
    "another audience": EC.token(aud="other"),
    "expired": EC.token(exp=int(time.time()) - 1),
    "of the future": EC.token(nbf=int(time.time()) + 3600),
    "issued in the future": EC.token(iat=int(time.time()) + 3600),
    "no exp": EC.token(exp=None),
    "no tenant": EC.token(tenant=None),
    "a subject for a tenant": EC.token(tenant=None, sub="team"),
    "other claims": changed(GOOD, 1, lambda _: payload_of(roles=["admin"])),
    "another header": changed(GOOD, 0, lambda _: encoded({**HEADER, "typ": "x"})),
    "no signature": changed(GOOD, 2, lambda _: ""),
    "half a signature": changed(GOOD, 2, lambda found: found[:43]),
    "another signature": changed(GOOD, 2, lambda found: found[::-1]),
    "a longer signature": changed(GOOD, 2, lambda found: found + "AAAA"),
    "padding": changed(GOOD, 2, lambda found: found + "=="),
    "a space": changed(GOOD, 2, lambda found: found + " "),
    "no base64 in the header": changed(GOOD, 0, lambda found: f"eyJ!{found}"),
    "no base64 in the payload": changed(GOOD, 1, lambda found: f"{found}\u00e9"),
    "a payload that is no object": signed_by_ec(HEADER, [valid_claims()]),
    "a payload that is no JSON": signed_by_ec(HEADER, b"{"),
    "a payload that is no text": signed_by_ec(HEADER, b'{"iss": "\xff"}'),
    "a header that is no object": signed_by_ec(["ES256"], CLAIMS),
    "a deep payload": signed_by_ec(HEADER, NESTED[:5000]),
    "a deep header": signed_by_ec(NESTED[:5000], CLAIMS),
    "too long": EC.token(filling="x" * MAX_TOKEN_BYTES),
    "empty": "",
    "dots": "..",
    "a dot less": GOOD.replace(".", "", 1),
    "a dot more": GOOD + ".AAAA",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_or_malformed_token_has_no_caller(tokens: JsonWebTokens, name: str) -> None:
    assert find(tokens, GOOD) is not None
    assert find(tokens, FORGED[name]) is None
    assert tokens.count == 1
    assert find(tokens, GOOD) is not None


def test_other_spellings_of_a_signature_are_refused(tokens: JsonWebTokens) -> None:
    """A token would take several places otherwise."""
    token = next(
        each for each in (EC.token(n=n) for n in range(100)) if set("-_") & set(each[-86:])
    )
    signature = token.rpartition(".")[2]
    spellings = [
        signature.replace("-", "+").replace("_", "/"),
        *(signature[:-1] + last for last in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    ]
    found = [each for each in spellings if find(tokens, changed(token, 2, lambda _, e=each: e))]  # type: ignore[misc]
    assert set(found) <= {signature}
    assert find(tokens, token) is not None


def test_a_token_of_the_largest_size_is_verified(tokens: JsonWebTokens) -> None:
    least = len(EC.token(filling=""))
    fitting = EC.token(filling="x" * ((MAX_TOKEN_BYTES - least) * 3 // 4 - 2))
    assert MAX_TOKEN_BYTES - 8 < len(fitting) <= MAX_TOKEN_BYTES
    assert find(tokens, fitting) is not None


def test_an_unknown_key_is_noted_for_tokens_of_the_issuer_only(source: HeldKeys) -> None:
    tokens = JsonWebTokens(RULES, source)
    for token in (GOOD, STRANGER.token(), EC.token({"kid": "new"}, iss="other"), "eyJ.."):
        find(tokens, token)
    assert source.unknown == 0
    find(tokens, EC.token({"kid": "new"}))
    assert source.unknown == 1


def test_a_token_is_never_shown(tokens: JsonWebTokens, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = EC.token(sub="marker")
    found = caller(tokens, token)
    for forged in FORGED.values():
        find(tokens, forged)
    shown = repr((found, tokens, vars(tokens).keys())) + caplog.text
    for part in (*token.split("."), "marker"):
        assert part not in shown
    assert caplog.records == []
