"""Names of headers and metadata that models get as parameters (protocol: header forwarding)."""

import re
from collections.abc import Iterable

from gateway.policy.credentials import METADATA

SECRET = METADATA | {"cookie", "proxy-authorization"}
"""Headers with secrets of clients, which no pattern forwards."""
RESERVED = re.compile(r"(?:triton_|sequence_|sluice).*|priority|timeout|cancel", re.I | re.S)
"""Names of parameters with a meaning for the server, in any case."""


def is_reserved(name: str) -> bool:
    """Whether a header of that name could pass for a parameter of the protocol."""
    return RESERVED.fullmatch(name) is not None


class ForwardedNames:
    """The names that a pattern finds, regardless of case, without those of secrets.

    `restricted` are the headers of restricted areas, in lower case. The pattern "" finds none: then
    it is not `on`.
    """

    def __init__(self, pattern: str, restricted: Iterable[str] = ()) -> None:
        self.on = bool(pattern)
        self._pattern = re.compile(pattern, re.IGNORECASE)
        self._withheld = SECRET.union(restricted)

    def include(self, name: str) -> bool:
        """Whether a header of that name is forwarded."""
        return self._pattern.search(name) is not None and name.lower() not in self._withheld
