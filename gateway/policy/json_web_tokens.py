"""JSON Web Tokens of requests: their verification, and the callers of verified ones (RFC 7519).

The signature is looked at last, and once for each token: one that has expired, is for others or
names an unknown key costs a tenth of a signature (15 of 50 to 200 microseconds). A forged token
with all of that right costs one signature, which is bounded by the size of a token. The number of
them in a second is not limited: beyond a limit the tokens of new callers would be refused as well.
Those of known callers need no signature meanwhile.
"""

import asyncio
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from time import time
from typing import NamedTuple, TypeVar
from weakref import KeyedRef, WeakValueDictionary

import orjson

from gateway.policy.caller import Caller
from gateway.policy.key_set import KeySet, VerificationKey
from gateway.policy.key_set_source import KeySetSource
from gateway.policy.token_rules import Claims, TokenRules
from gateway.policy.watched_file import LOOK_SECS, ReloadFailures

MAX_TOKEN_BYTES = 8 * 1024
"""Of a given token; a longer one is refused without a digest."""
MAX_VERIFIED = 10_000
"""Verified tokens that are not verified again; above it the oldest ones are."""
MAX_FORGED = 1_000
"""Forged tokens likewise: a request that is refused has been looked at twice."""

T = TypeVar("T")

log = logging.getLogger("sluice.server")


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class TokenCaller(Caller):
    """The sender of all requests with one token, which `key` verifies until it `expires`."""

    key: VerificationKey


class JsonWebTokens:
    """The tokens that a key of the source has signed, and that meet the rules.

    What a signature proves depends on the token and its key only: a verified token is valid until
    it expires, or its key is no longer in the set.
    """

    def __init__(self, rules: TokenRules, source: KeySetSource) -> None:
        self._rules = rules
        self._source = source
        self._verified: dict[bytes, TokenCaller] = {}
        self._forged: dict[bytes, VerificationKey] = {}
        # Callers with a request in flight stay here, also if their token is verified no more.
        self._callers: WeakValueDictionary[bytes, TokenCaller] = WeakValueDictionary()

    @property
    def failures(self) -> ReloadFailures:
        """The failures of reading the key set again."""
        return self._source.failures

    @property
    def count(self) -> int:
        """The number of tokens that are not verified again."""
        return len(self._verified)

    def find(self, given: bytes, now: float) -> Caller | None:
        """The caller with a token, if that is valid; the same one for each of its requests."""
        if len(given) > MAX_TOKEN_BYTES:
            return None
        digest = sha256(given).digest()
        found = self._verified.get(digest)
        if found is not None and found.valid and now < found.expires:
            return found
        return self._find_new(given, digest, now)

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        """Read the key set again, and end callers within LOOK_SECS after their token expires.

        `on_invalid` is called when callers are no longer valid.
        """
        end_callers = partial(self._end_callers, on_invalid)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._source.follow(end_callers))
            while True:
                await asyncio.sleep(LOOK_SECS)
                try:
                    await end_callers()
                except Exception as error:  # noqa: BLE001 - the next round tries again
                    log.error("expired tokens not ended", extra={"reason": str(error)})

    async def _end_callers(self, on_invalid: Callable[[], None]) -> None:
        callers = self._callers.valuerefs()
        if not callers:
            return
        ended = await asyncio.to_thread(_ended, callers, self._source.keys, time())
        for each in ended:
            each.valid = False
        if ended:
            on_invalid()

    def _find_new(self, given: bytes, digest: bytes, now: float) -> TokenCaller | None:
        token = _parsed(given)
        if token is None:
            return None
        owner = self._rules.owner(token.claims, now)
        if owner is None:
            return None
        key = self._source.keys.find(token.algorithm, token.kid)
        if key is None:
            self._source.note_unknown()
            return None
        forged_for = self._forged.get(digest)
        if forged_for == key:
            return None
        if not key.verifies(token.algorithm, token.signed, token.signature):
            _put(self._forged, digest, key, MAX_FORGED)
            return None
        caller = self._callers.get(digest)
        if caller is None or not caller.valid:
            caller = TokenCaller(
                tenant=owner.tenant, roles=owner.roles, expires=owner.expires, key=key
            )
        self._callers[digest] = caller
        _put(self._verified, digest, caller, MAX_VERIFIED)
        return caller


class _Token(NamedTuple):
    """The parts of a token that nothing has verified yet."""

    algorithm: str
    kid: str | None
    claims: Claims
    signed: bytes
    signature: bytes


def _parsed(given: bytes) -> _Token | None:
    """The parts of a token in the compact form (RFC 7515, 7.1); None if it is malformed.

    Headers other than `alg`, `kid` and `crit` decide nothing: keys come from the key set only.
    `crit` names extensions that must be understood (RFC 7515, 4.1.11); none is.
    """
    signed, _, signature = given.rpartition(b".")
    try:
        header, claims = (orjson.loads(_decoded(each)) for each in signed.split(b"."))
        decoded = _decoded(signature)
    except ValueError:
        return None
    if not isinstance(header, dict) or not isinstance(claims, dict) or "crit" in header:
        return None
    algorithm, kid = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or not isinstance(kid, str | None):
        return None
    return _Token(algorithm, kid, claims, signed, decoded)


def _decoded(segment: bytes) -> bytes:
    """The bytes of base64url without padding; ValueError for another spelling of them."""
    found = urlsafe_b64decode(segment + b"==")
    if urlsafe_b64encode(found).rstrip(b"=") != segment:
        raise ValueError("it is no base64url")
    return found


def _put(table: dict[bytes, T], digest: bytes, value: T, most: int) -> None:
    """Add an entry to a table, without the oldest one if it is full."""
    table.pop(digest, None)
    if len(table) >= most:
        del table[next(iter(table))]
    table[digest] = value


def _ended(
    callers: Iterable[KeyedRef[bytes, TokenCaller]], keys: KeySet, now: float
) -> Sequence[TokenCaller]:
    """The callers whose token has expired, or whose key is not in the set any more."""
    found = [caller for each in callers if (caller := each()) is not None and caller.valid]
    used = {id(each.key): each.key for each in found}
    gone = {number for number, key in used.items() if key not in keys.keys}
    return [each for each in found if each.expires <= now or id(each.key) in gone]
