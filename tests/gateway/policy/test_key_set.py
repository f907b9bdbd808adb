"""Key sets: the keys that can be used, the key of a token, and sets that are refused."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from jwt import get_algorithm_by_name

from gateway.policy.key_file import KeyFileError
from gateway.policy.key_set import ALGORITHMS, KeySet, read_key_set
from tests.issuer import PRIVATE_KEYS, SigningKey, key_set, rsa_key

EC = SigningKey("one")
RSA = SigningKey("rsa", "RS256")


def read(*entries: Any) -> KeySet:
    return read_key_set(json.dumps({"keys": entries}))


def test_a_key_is_found_by_its_name_and_the_algorithm() -> None:
    other = SigningKey("two")
    found = read_key_set(key_set(EC, other, RSA))
    assert len(found.keys) == 3
    for key in (EC, other):
        chosen = found.find("ES256", key.kid)
        assert chosen is not None
        assert chosen.kid == key.kid
    assert found.find("ES384", "one") is None
    assert found.find("ES256", "rsa") is None
    assert found.find("ES256", "three") is None
    assert found.find("ES256", "../../../etc/passwd") is None
    for algorithm in ("none", "None", "HS256", "ES256K", ""):
        assert found.find(algorithm, "one") is None
        assert found.find(algorithm, "rsa") is None
        assert found.find(algorithm, None) is None


def test_a_token_without_a_name_has_the_only_key_that_fits() -> None:
    found = read_key_set(key_set(EC, RSA))
    assert found.find("ES256", None) is found.find("ES256", "one")
    assert found.find("PS512", None) is found.find("PS512", "rsa")
    assert found.find("EdDSA", None) is None
    assert read_key_set(key_set(EC, SigningKey("two"))).find("ES256", None) is None


def test_a_key_without_a_name_is_not_that_of_a_named_token() -> None:
    found = read_key_set(key_set(SigningKey(None)))
    assert found.find("ES256", None) is not None
    assert found.find("ES256", "one") is None


@pytest.mark.parametrize("algorithm", [each for every in ALGORITHMS.values() for each in every])
def test_a_signature_is_verified_by_its_algorithm_only(algorithm: str) -> None:
    key = SigningKey("one", algorithm)
    found = read(key.jwk()).find(algorithm, "one")
    assert found is not None
    signed, _, signature = key.token().rpartition(".")
    decoded = base64.urlsafe_b64decode(signature + "==")
    assert found.verifies(algorithm, signed.encode(), decoded)
    assert not found.verifies(algorithm, signed.encode() + b"x", decoded)
    assert not found.verifies(algorithm, signed.encode(), decoded[:-1])
    assert not found.verifies(algorithm, signed.encode(), b"")
    for other in found.algorithms - {algorithm}:
        assert not found.verifies(other, signed.encode(), decoded)


def test_the_alg_of_a_key_is_its_only_algorithm() -> None:
    found = read(RSA.jwk(alg="PS256"))
    assert found.find("PS256", "rsa") is not None
    assert found.find("RS256", "rsa") is None


def private_jwk() -> Mapping[str, Any]:
    found: dict[str, Any] = get_algorithm_by_name("ES256").to_jwk(EC.private, as_dict=True)
    return found


@pytest.mark.parametrize(
    "entry",
    [
        SigningKey("x", "ES512").jwk(),
        {"kty": "oct", "kid": "x", "k": "c2VjcmV0", "alg": "HS256"},
        {"kty": "oct", "kid": "x", "k": "c2VjcmV0", "alg": "ES256", "crv": "P-256"},
        private_jwk(),
        EC.jwk(use="enc"),
        EC.jwk(key_ops=["sign"]),
        EC.jwk(key_ops="verify"),
        EC.jwk(alg="ES384"),
        EC.jwk(alg="HS256"),
        RSA.jwk(alg="none"),
        EC.jwk(kid=5),
        EC.jwk(kty=["EC"]),
        EC.jwk(crv="P-384"),
        EC.jwk(x="AAAA"),
        EC.jwk(x=5),
        EC.jwk(x="!" * 43),
        EC.jwk(x="A" * 43),
        {"kty": "EC", "crv": "P-256"},
        {"kty": "RSA", "n": RSA.jwk()["n"]},
        {**RSA.jwk(), "e": "AA"},
        SigningKey("x", "EdDSA").jwk(crv="Ed448"),
        SigningKey("x", "EdDSA").jwk(x="AAAA"),
        "key",
        None,
        [],
    ],
)
def test_a_key_that_cannot_be_used_is_ignored(entry: Any) -> None:
    assert [each.kid for each in read(entry, EC.jwk()).keys] == ["one"]
    with pytest.raises(KeyFileError, match="it has no usable key among 1, expected public keys"):
        read(entry)


def test_a_short_rsa_key_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIVATE_KEYS, "RS256", lambda: rsa_key(1024))  # type: ignore[misc]
    assert len(read(SigningKey("short", "RS256").jwk(), EC.jwk()).keys) == 1


@pytest.mark.parametrize(
    "entry", [EC.jwk(use="sig"), EC.jwk(alg="ES256"), EC.jwk(key_ops=["verify"]), EC.jwk(x5u="x")]
)
def test_members_that_fit_change_nothing(entry: Any) -> None:
    assert len(read(entry).keys) == 1


def test_a_name_that_two_keys_have_is_refused_if_they_have_one_algorithm() -> None:
    with pytest.raises(KeyFileError, match=r"two keys have the kid 'one' and the algorithm ES256"):
        read(EC.jwk(), SigningKey("one").jwk())
    assert len(read(EC.jwk(), EC.jwk()).keys) == 1
    both = read(EC.jwk(), SigningKey("one", "EdDSA").jwk())
    assert both.find("ES256", "one") != both.find("EdDSA", "one")
    split = read(RSA.jwk(alg="RS256"), RSA.jwk(alg="PS256"))
    assert split.find("RS256", "rsa") != split.find("PS256", "rsa")


def test_a_long_name_is_cut_in_the_text_of_the_refusal() -> None:
    name = "x" * 1000
    with pytest.raises(KeyFileError) as refused:
        read(EC.jwk(kid=name), SigningKey(name).jwk())
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no JSON: "),
        ("<html>", "it is no JSON: "),
        (key_set(EC)[:-1], "it is no JSON: "),
        ("[" * 100_000, "it is no JSON: "),
        ("[]", "it is no JWK set, expected an object with a list 'keys'"),
        (json.dumps(EC.jwk()), "it is no JWK set"),
        ('{"keys": {}}', "it is no JWK set"),
        ('{"keys": []}', "it has no usable key among 0, expected public keys for signatures: RSA"),
    ],
)
def test_a_text_that_is_no_set_is_refused(text: str, reason: str) -> None:
    with pytest.raises(KeyFileError) as refused:
        read_key_set(text)
    assert str(refused.value).startswith(reason)


def test_keys_are_equal_if_their_values_are() -> None:
    assert read(EC.jwk()).keys == read(EC.jwk(use="sig")).keys
    assert read(EC.jwk()).keys != read(SigningKey("one").jwk()).keys
    assert read(EC.jwk()).keys != read(EC.jwk(kid="two")).keys
    assert read(RSA.jwk()).keys != read(RSA.jwk(alg="RS256")).keys
