"""Triton's restricted areas: requests need a header with a secret value."""

import hmac
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from gateway.policy.areas import RESTRICTABLE, Area

GRPC_PREFIX = "triton-grpc-protocol-"
"""The prefix of the name of the header in gRPC's metadata (server: `grpc_server.cc`)."""
FROM_FILE = "@"
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of a header (RFC 9110, 5.6.2)."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that the requests of an area need; only a digest of its value is kept.

    `name` is in lower case, `shown` as it was given.
    """

    shown: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, value: str) -> "Restriction":
        """The restriction to that header with that value."""
        return cls(name, sha256(os.fsencode(value)).digest())

    @property
    def name(self) -> str:
        """The name of the header in lower case."""
        return self.shown.lower()

    def allows(self, values: Iterable[bytes]) -> bool:
        """Whether one of the values of the header is right; the time does not depend on them."""
        matches = [hmac.compare_digest(sha256(each).digest(), self.digest) for each in values]
        return any(matches)


Restrictions = Mapping[Area, Restriction]
NO_RESTRICTIONS: Restrictions = MappingProxyType({})


def read_restrictions(groups: Sequence[str], kind: str) -> Restrictions:
    """The restrictions of some options `AREA[,AREA...]:NAME=VALUE`.

    VALUE may be `@` and the path of a file with the value. `kind` is Triton's word for an area.
    ValueError, mostly with Triton's text, if an area is unknown or in two groups, or a part is
    missing.
    """
    found: dict[Area, Restriction] = {}
    for group in groups:
        header, _, value = group.partition("=")
        names, _, name = header.partition(":")
        if not (names and NAME.fullmatch(name) and value):
            raise ValueError(f"'{header}=': expected AREA[,AREA...]:NAME=VALUE")
        restriction = Restriction.of(name, _value(value))
        for area in _areas(names, kind):
            if area in found:
                raise ValueError(
                    f"restricted {kind} '{area}' can not be specified in multiple config groups"
                )
            found[area] = restriction
    return found


def _areas(names: str, kind: str) -> Iterator[Area]:
    for name in names.split(","):
        if name not in RESTRICTABLE:
            expected = ", ".join(RESTRICTABLE)
            raise ValueError(f"unknown restricted {kind} '{name}', expected one of {expected}")
        yield Area(name)


def _value(text: str) -> str:
    if not text.startswith(FROM_FILE):
        return _sendable(text, "the value")
    path = Path(text.removeprefix(FROM_FILE))
    try:
        value = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"the value in '{path}' cannot be read: {reason}") from None
    if not value:
        raise ValueError(f"the file '{path}' is empty, expected the value of the header")
    return _sendable(value, f"the value in '{path}'")


def _sendable(value: str, what: str) -> str:
    """The value, if a client can send it in a header (RFC 9110, 5.5)."""
    if value != value.strip() or CONTROL.search(value):
        raise ValueError(f"{what} begins or ends with a blank or has control characters")
    return value
