"""Which headers of a request its model gets as parameters."""

import re
from collections.abc import Iterable

from starlette.types import Scope

HEADER_NAMES = "header_names"
"""Where a request's state has the names of its headers as the client wrote them."""


class HeaderFilter:
    """Picks headers by a regular expression that is found in their names, whatever their case."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern.encode(), re.IGNORECASE) if pattern else None

    def of(self, scope: Scope) -> Iterable[tuple[str, str]]:
        """Name and value of each header that is to be forwarded; none without a pattern."""
        if self._pattern is None:
            return ()
        values = [value for _, value in scope["headers"]]
        names = scope.get("state", {}).get(HEADER_NAMES) or [name for name, _ in scope["headers"]]
        return [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in zip(names, values, strict=True)
            if self._pattern.search(name)
        ]
