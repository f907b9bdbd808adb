"""Credentials of requests: API keys, tokens, certificates, and the areas of their roles."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from gateway.policy.areas import Area
from gateway.policy.audit import AuditLog
from gateway.policy.caller import Caller, shown
from gateway.policy.certificates import KINDS
from gateway.policy.control import ChangeControl
from gateway.policy.keys import ListedCertificate, Role
from gateway.policy.restrictions import Restrictions
from gateway.policy.watched_file import ReloadFailures

AUTHORIZATION = b"authorization"
NAMES = frozenset({AUTHORIZATION, b"x-api-key", b"api-key"})
"""Headers with a credential."""
METADATA = frozenset(each.decode() for each in NAMES)
"""The same as metadata of gRPC."""
SHOWN_CHARS = 256
"""Of the name of a certificate in an error."""

REFUSALS_PER_SEC = 200.0
REFUSALS_AT_ONCE = 500.0
MOST_WAIT_SECS = 1.0

MAY_READ: Mapping[Area, frozenset[Role]] = {
    Area.METADATA: frozenset(Role),
    Area.INFERENCE: frozenset({Role.INFER}),
    Area.MODEL_CONFIG: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.MODEL_REPOSITORY: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.SHARED_MEMORY: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.STATISTICS: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.ADMIN: frozenset({Role.ADMIN}),
    Area.TRACE: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.LOGGING: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.METRICS: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.ADMIN: frozenset({Role.ADMIN}),
}
"""The roles for requests that change nothing; the other areas need no credential."""
MAY_CHANGE = frozenset({Role.ADMIN})


class Reason(Enum):
    """The fault of a refused request; the value is the label of the metric."""

    MALFORMED = "malformed"
    MISSING = "missing"
    WRONG = "wrong"
    FORBIDDEN = "forbidden"


class KeyRefusal(NamedTuple):
    """The refusal of a request, with its text; the caller if its credential is valid."""

    reason: Reason
    message: str
    caller: Caller | None = None


class RefusalPace:
    """The waits of refusals: none of REFUSALS_AT_ONCE, then those of REFUSALS_PER_SEC.

    A refusal waits at most MOST_WAIT_SECS, so a longer queue is sent faster. A flood of wrong keys
    on some connections waits on them, and other clients have the time that it would take. The pace
    is that of all clients: an address is easily changed.
    """

    def __init__(self) -> None:
        self._ahead_until = 0.0

    def wait_secs(self, now: float) -> float:
        """The time until the next refusal is sent."""
        since = max(self._ahead_until, now)
        allowed = now + REFUSALS_AT_ONCE / REFUSALS_PER_SEC
        self._ahead_until = min(since + 1 / REFUSALS_PER_SEC, allowed + MOST_WAIT_SECS)
        return max(0.0, self._ahead_until - allowed)


class CredentialSource(Protocol):
    """One kind of credentials."""

    @property
    def failures(self) -> ReloadFailures:
        """The failures of reading its keys again."""

    def find(self, given: bytes, now: float) -> Caller | None:
        """The caller with a credential; None if that is not valid."""

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        """Read its keys again; `on_invalid` is called when callers are no longer valid."""


class KeySource(CredentialSource, Protocol):
    """API keys, and the certificates that are listed with them."""

    def find_certificate(self, name: str) -> ListedCertificate | None:
        """The entry of the certificates with a name, also one that has expired."""


class Wording(NamedTuple):
    """The words for the credentials of a server in the texts of refusals."""

    name: str
    plural: str
    expected: str


OF_KEYS = Wording("API key", "API keys", "expected 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
OF_TOKENS = Wording("token", "tokens", "expected 'Authorization: Bearer TOKEN'")
OF_BOTH = Wording(
    "API key or token",
    "API keys or tokens",
    "expected 'Authorization: Bearer KEY_OR_TOKEN' or 'x-api-key: KEY'",
)


class Credentials:
    """The API keys and certificates of a server, its JSON Web Tokens, or both.

    `refusals` are by wire and reason; `clock` is the time of their pace in seconds.
    """

    def __init__(
        self,
        keys: KeySource | None = None,
        tokens: CredentialSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._pace = RefusalPace()
        self._keys = keys
        self._tokens = tokens
        self._sources = [each for each in (keys, tokens) if each is not None]
        self._words = OF_KEYS if tokens is None else OF_TOKENS if keys is None else OF_BOTH
        self.refusals: Counter[tuple[str, Reason]] = Counter()

    @property
    def reload_failures(self) -> Mapping[str, int]:
        """The failures of reading keys again: those of `keys` and of `jwks`."""
        found = {"keys": self._keys, "jwks": self._tokens}
        return {name: each.failures.count for name, each in found.items() if each is not None}

    def check(
        self,
        given: Sequence[tuple[bytes, bytes]],
        roles: frozenset[Role],
        certificate: str | None = None,
    ) -> Caller | KeyRefusal:
        """The caller of a request with these headers of NAMES, if it has one of the roles.

        `certificate` is the identity of the client's certificate, None without mutual TLS. One that
        is listed decides, and not the credential in a header; one there of another tenant makes the
        request malformed.
        """
        if certificate is not None and self._keys is not None:
            return self._check_certified(self._keys, certificate, given, roles)
        if len(given) != 1:
            return self._check_several(given, roles)
        name, value = given[0]
        credential = _in_header(name, value)
        if credential is None:
            return self._missing()
        return self._check_only(credential, name == AUTHORIZATION, roles)

    def note(self, wire: str, refusal: KeyRefusal) -> float:
        """Count a refused request of a wire; the time in seconds after which it is answered."""
        self.refusals[wire, refusal.reason] += 1
        return 0.0 if refusal.caller is not None else self._pace.wait_secs(self._clock())

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        """Read the keys again whenever they change; `on_invalid` is called when callers end."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._sources:
                tasks.create_task(each.follow(on_invalid))

    def _check_certified(
        self,
        keys: KeySource,
        name: str,
        given: Sequence[tuple[bytes, bytes]],
        roles: frozenset[Role],
    ) -> Caller | KeyRefusal:
        found = self.check(given, roles)
        reason = found.reason if isinstance(found, KeyRefusal) else None
        listed = keys.find_certificate(name)
        if listed is None:
            return self._missing(_fault_of(name)) if reason is Reason.MISSING else found
        if reason is Reason.MALFORMED:
            return found
        other = found.caller if isinstance(found, KeyRefusal) else found
        if other is not None and other.tenant != listed.tenant:
            certificate, credential = _named(listed.caller), _named(other)
            text = f"the {certificate} and the {credential} are of two tenants, expected one"
            return KeyRefusal(Reason.MALFORMED, text)
        if listed.expires <= time.time():
            return KeyRefusal(Reason.WRONG, f"the {_named(listed.caller)} is no longer valid here")
        return _permitted(listed.caller, roles)

    def _check_several(
        self, given: Sequence[tuple[bytes, bytes]], roles: frozenset[Role]
    ) -> Caller | KeyRefusal:
        bearers = [_in_header(name, value) for name, value in given if name == AUTHORIZATION]
        if len(bearers) > 1:
            return self._malformed("two headers Authorization")
        found = {key for name, value in given if (key := _in_header(name, value)) is not None}
        if not found:
            return self._missing()
        if len(found) > 1:
            return self._malformed(f"two different {self._words.plural}")
        credential = found.pop()
        return self._check_only(credential, bearers == [credential], roles)

    def _check_only(
        self, credential: bytes, is_bearer: bool, roles: frozenset[Role]
    ) -> Caller | KeyRefusal:
        """The caller with a credential; `is_bearer`: it is in Authorization, as a token is."""
        is_token = is_bearer and self._tokens is not None and _is_token(credential)
        source = self._tokens if is_token else self._keys
        caller = None if source is None else source.find(credential, time.time())
        if caller is None:
            return KeyRefusal(Reason.WRONG, f"the {self._words.name} is not valid")
        return _permitted(caller, roles)

    def _missing(self, fault: str = "") -> KeyRefusal:
        name, _, expected = self._words
        return KeyRefusal(Reason.MISSING, f"the {name} is missing{fault}, {expected}")

    def _malformed(self, has: str) -> KeyRefusal:
        return KeyRefusal(Reason.MALFORMED, f"the request has {has}, {self._words.expected}")


def _in_header(name: bytes, value: bytes) -> bytes | None:
    """The credential in a header; None for an Authorization of another scheme (RFC 6750, 2.1)."""
    if name != AUTHORIZATION:
        return value.strip()
    scheme, _, credential = value.strip().partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else None


def _is_token(credential: bytes) -> bool:
    """Whether it has the form of a JSON Web Token: the base64url of `{"`, and two dots."""
    return credential.startswith(b"eyJ") and credential.count(b".") == 2


def _permitted(caller: Caller, roles: frozenset[Role]) -> Caller | KeyRefusal:
    """The caller, if it has one of the roles."""
    if not roles.isdisjoint(caller.roles):
        return caller
    has = f"has the role {_listed(caller.roles)}" if caller.roles else "has no role"
    text = f"the {_named(caller)} {has}, expected {_listed(roles)}"
    return KeyRefusal(Reason.FORBIDDEN, text, caller)


def _named(caller: Caller) -> str:
    """The credential of a caller; the name of a certificate has its kind in front."""
    if caller.key_id.startswith(KINDS):
        return f"certificate '{shown(caller.key_id, SHOWN_CHARS)}'"
    return f"API key '{caller.key_id}'" if caller.key_id else "token"


def _fault_of(name: str) -> str:
    """The fault of a certificate that is not listed."""
    if not name:
        return " and the certificate has no URI, DNS name or CN"
    return f" and the certificate '{shown(name, SHOWN_CHARS)}' is not listed"


def _listed(roles: frozenset[str]) -> str:
    return " or ".join(each for each in Role if each in roles)


@dataclass(frozen=True, slots=True)
class Access:
    """The conditions of all routes, or of all methods. Without `credentials` none is needed.

    `audit` gets a line for each change. Without `changes` what changes the server does not exist:
    another port has it.
    """

    restrictions: Restrictions = field(default_factory=dict)
    control: ChangeControl = field(default_factory=ChangeControl)
    credentials: Credentials | None = None
    audit: AuditLog | None = None
    changes: bool = True

    @property
    def control_of_changes(self) -> ChangeControl:
        """The control of changes: a credential may be that of another machine."""
        return self.control if self.credentials is None else self.control.opened()
