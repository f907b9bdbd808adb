"""JWK sets: the public keys of an issuer of tokens (RFC 7517)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt import PyJWK, PyJWTError
from jwt.api_jws import get_algorithm_by_name

from gateway.policy.key_file import KeyFileError

MAX_SET_BYTES = 1024 * 1024


class KeyType(NamedTuple):
    """A type of keys with its curve, "" for none."""

    kty: str
    crv: str = ""


RSA = KeyType("RSA")
ALGORITHMS: Mapping[KeyType, tuple[str, ...]] = {
    RSA: ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    KeyType("EC", "P-256"): ("ES256",),
    KeyType("EC", "P-384"): ("ES384",),
    KeyType("OKP", "Ed25519"): ("EdDSA",),
}
"""The algorithms of signatures by the type of their key: asymmetric ones only (RFC 8725, 3.1)."""
RSA_BITS = range(2048, 8192 + 1)
EXPECTED = (
    "expected public keys for signatures: RSA of 2048 to 8192 bits, EC with P-256 or P-384, Ed25519"
)
SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key; `kid` is None if the set gives it no name.

    Keys are equal if their names, algorithms and values (DER) are.
    """

    kid: str | None
    algorithms: frozenset[str]
    der: bytes = field(repr=False)
    key: Any = field(repr=False, compare=False)

    def verifies(self, algorithm: str, signed: bytes, signature: bytes) -> bool:
        """Whether a signature of these bytes is by this key (30 to 200 microseconds)."""
        return get_algorithm_by_name(algorithm).verify(signed, self.key, signature)


class KeySet:
    """The usable keys of a set. KeyFileError if two of them have one name and one algorithm."""

    def __init__(self, keys: Iterable[VerificationKey] = ()) -> None:
        self.keys = frozenset(keys)
        self._named: dict[tuple[str, str], VerificationKey] = {}
        self._fitting: dict[str, list[VerificationKey]] = {}
        for key in self.keys:
            for algorithm in key.algorithms:
                self._add(key, algorithm)

    def _add(self, key: VerificationKey, algorithm: str) -> None:
        self._fitting.setdefault(algorithm, []).append(key)
        if key.kid is None:
            return
        if (key.kid, algorithm) in self._named:
            shown = repr(key.kid)[:SHOWN_CHARS]
            raise KeyFileError(f"two keys have the kid {shown} and the algorithm {algorithm}")
        self._named[key.kid, algorithm] = key

    def find(self, algorithm: str, kid: str | None) -> VerificationKey | None:
        """The key that a token names, or else the only one that fits the algorithm."""
        if kid is not None:
            return self._named.get((kid, algorithm))
        fitting = self._fitting.get(algorithm, ())
        return fitting[0] if len(fitting) == 1 else None


def read_key_set(text: str) -> KeySet:
    """The usable keys of a set; KeyFileError if the text is no set, or none of them is usable.

    Others are ignored (RFC 7517, 5): private ones, those of other types, sizes and uses.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise KeyFileError(f"it is no JSON: {error}") from None
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise KeyFileError("it is no JWK set, expected an object with a list 'keys'")
    keys = [key for each in entries if (key := _key(each)) is not None]
    if not keys:
        raise KeyFileError(f"it has no usable key among {len(entries)}, {EXPECTED}")
    return KeySet(keys)


def _key(entry: Any) -> VerificationKey | None:
    """The key of an entry; None if it is not usable."""
    if not isinstance(entry, dict) or not _is_for_verification(entry):
        return None
    kid, kty, crv = (entry.get(name) for name in ("kid", "kty", "crv"))
    kind = RSA if kty == RSA.kty else KeyType(str(kty), str(crv))
    algorithms = [each for each in ALGORITHMS.get(kind, ()) if entry.get("alg", each) == each]
    if not algorithms or not isinstance(kid, str | None):
        return None
    try:
        key: Any = PyJWK(entry, algorithms[0]).key
    except (PyJWTError, UnsupportedAlgorithm):
        return None
    if kind == RSA and key.key_size not in RSA_BITS:
        return None
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return VerificationKey(kid, frozenset(algorithms), der, key)


def _is_for_verification(entry: Mapping[str, Any]) -> bool:
    """Whether a key is public, and its `use` and `key_ops` are signatures (RFC 7517, 4.2, 4.3)."""
    operations = entry.get("key_ops", ["verify"])
    return (
        "d" not in entry
        and entry.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
    )
