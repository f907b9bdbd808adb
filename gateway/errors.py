"""Errors of requests: one exception and one enum of codes."""

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
    """The only error that a client receives.

    The message names the object, the found and the expected value. It is sent to the client
    unchanged, so it must not contain a path of the host or a traceback.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def reason(self) -> str:
        """The text for state reasons and logs, such as `Invalid argument: no such field`."""
        return f"{self.code.value}: {self.message}"


class AnsweredError(InferenceError):
    """An error that the model itself returns; the client receives it as any other error.

    In the statistics the request counts as successful, as on Triton.
    """


def exiting() -> InferenceError:
    """The refusal of a server that stops, with Triton's text."""
    return InferenceError(Code.UNAVAILABLE, "Server exiting")


def unexpected() -> InferenceError:
    """The error of a defect of the server, on every protocol."""
    return InferenceError(Code.INTERNAL, "internal error; the server's log says why")


def first_error(group: BaseException) -> BaseException:
    """The first error in a group, however deep; an error outside a group is returned itself."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
