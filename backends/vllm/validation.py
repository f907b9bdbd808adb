"""What is wrong, in one line, when pydantic refuses a value?"""

import re
from itertools import takewhile

from pydantic import ValidationError

_NAME = re.compile("[a-z0-9_]+")


def first_mistake(error: Exception) -> str:
    """The first thing that is wrong and where; the text of any other error as it is.

    pydantic tells every alternative it has tried, the value itself, and where to read more.
    """
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Beyond the names and indices, pydantic lists the types it has tried.
    place = ".".join(takewhile(_NAME.fullmatch, map(str, first["loc"])))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{message} (at {place})" if place else message
