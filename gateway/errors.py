"""What can go wrong for a client: one exception, one enum of codes."""

from enum import Enum


class Code(Enum):
    """Triton's eight status codes; the value is the text form used in state reasons."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class InferenceError(Exception):
    """The only failure a client sees.

    The message names the object, what was found and what was expected. It must not carry a path
    of the host or a traceback: it is sent to the client as it is.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def reason(self) -> str:
        """The form of state reasons and logs, such as `Invalid argument: no such field`."""
        return f"{self.code.value}: {self.message}"


class AnsweredError(InferenceError):
    """What a model itself answers a request with: to the client an error as any other.

    In the statistics the request has been answered, as on Triton.
    """


def first_error(group: BaseException) -> BaseException:
    """The first error in a group, however deep; an error that is no group is its own."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


UNEXPECTED = InferenceError(Code.INTERNAL, "internal error; the server's log says why")
"""What a client learns of a defect of ours, on every wire."""
