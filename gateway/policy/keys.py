"""API keys: `sk-sluice-ID-SECRET-CHECK`, looked up by their public ID, compared by their digest.

The secret has 256 bits; by the check scanners of texts know a key from other words. Certificates
are looked up by their name.
"""

import fnmatch
import hmac
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from zlib import crc32

from gateway.policy.caller import Caller
from gateway.policy.tenants import NO_TENANTS, TenantRules

PREFIX = "sk-sluice-"
ID_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
CHECK_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:-]{0,63}")
"""The name of a tenant."""
NAME_FORM = "1 to 64 letters, digits and . _ : -, the first a letter or a digit"
ID = slice(len(PREFIX), len(PREFIX) + 8)
API_KEY = "SLUICE_API_KEY"
"""The environment variable with the key of a command's requests."""
MAX_KEY_BYTES = 128
"""Of a given key; a longer one is refused without a digest."""


class Role(StrEnum):
    """The rights of a key, or of a certificate."""

    INFER = "infer"
    OBSERVE = "observe"
    ADMIN = "admin"


def _caller_of(key_id: str, listed: "ApiKey | ListedCertificate") -> Caller:
    """The sender of all requests with a key, or with a certificate."""
    globs = [fnmatch.translate(each) for each in listed.models]
    models = re.compile("|".join(globs)) if globs else None
    return Caller(
        tenant=listed.tenant,
        key_id=key_id,
        roles=listed.roles,
        models=models,
        expires=listed.expires,
    )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret; `expires` is in seconds of the Unix epoch.

    `caller` is the sender of all requests with this key. Only models whose name one of the globs
    `models` matches exist for it; with none, all do.
    """

    id: str
    digest: bytes = field(repr=False)
    tenant: str
    roles: frozenset[Role] = frozenset({Role.INFER})
    expires: float = math.inf
    models: tuple[str, ...] = ()
    note: str = field(default="-", compare=False)
    caller: Caller = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "caller", _caller_of(self.id, self))


@dataclass(frozen=True, slots=True)
class ListedCertificate:
    """The rights of the certificates with a name; `expires` is in seconds of the Unix epoch.

    `caller` is the sender of all requests with such a certificate, `models` as those of a key.
    """

    name: str
    tenant: str
    roles: frozenset[Role] = frozenset({Role.INFER})
    expires: float = math.inf
    models: tuple[str, ...] = ()
    note: str = field(default="-", compare=False)
    caller: Caller = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "caller", _caller_of(self.name, self))


def new_key() -> tuple[str, str, bytes]:
    """A key, its public id and its digest."""
    key_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(8))
    text = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    key = f"{text}-{_check(text)}"
    return key, key_id, sha256(key.encode()).digest()


def _check(text: str) -> str:
    number, characters = crc32(text.encode()), ""
    for _ in range(6):
        number, rest = divmod(number, len(CHECK_CHARACTERS))
        characters = CHECK_CHARACTERS[rest] + characters
    return characters


class KeyTable:
    """The keys of a file by their public id, and the certificates by their name.

    `expiring` are those that are valid for a time. `tenants` are the rules of tenants by name.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey] = (),
        certificates: Iterable[ListedCertificate] = (),
        tenants: Mapping[str, TenantRules] = NO_TENANTS,
    ) -> None:
        self.keys: Mapping[str, ApiKey] = MappingProxyType({each.id: each for each in keys})
        self.certificates: Mapping[str, ListedCertificate] = MappingProxyType(
            {each.name: each for each in certificates}
        )
        self.tenants: Mapping[str, TenantRules] = MappingProxyType(dict(tenants))
        self.expiring = [each for each in self.listed() if each.expires != math.inf]

    def listed(self) -> Iterator[ApiKey | ListedCertificate]:
        """The keys and the certificates."""
        yield from self.keys.values()
        yield from self.certificates.values()

    def find(self, given: bytes, now: float) -> ApiKey | None:
        """The key that a client gives, if it is valid; the time is that of a wrong one."""
        if len(given) > MAX_KEY_BYTES:
            return None
        key = self.keys.get(given[ID].decode("latin-1"), _NO_KEY)
        if hmac.compare_digest(sha256(given).digest(), key.digest) and now < key.expires:
            return key
        return None


_NO_KEY = ApiKey("", secrets.token_bytes(32), "")
"""The key of unknown ids: nothing has its digest."""
