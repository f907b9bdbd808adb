"""What is wrong, in one line, when pydantic refuses a value?"""

from pydantic import ValidationError


def first_mistake(error: Exception) -> str:
    """The first thing that is wrong and where; the text of any other error as it is.

    pydantic tells every alternative it has tried, the value itself, and where to read more.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"][:2])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{message} (at {place})" if place else message
