"""Errors of requests: one exception and one enum of codes."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum


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
    unchanged, so it must not contain a path of the host or a traceback. Half of a surrogate pair,
    which no wire can carry, is `?`.

    `dead_instance` is the number of the instance that died while it executed the request; 0 in an
    error of an instance itself, whose number its caller knows. It is None for other errors.
    `lacks_instance`: the request was not executed, because there is no instance.
    `of_step`: a step of an ensemble failed here, and counts for its model; `after_steps`: other
    steps had been called before.
    """

    def __init__(self, code: Code, message: str) -> None:
        if not message.isascii():
            message = message.encode(errors="replace").decode()
        super().__init__(message)
        self.code = code
        self.message = message
        self.dead_instance: int | None = None
        self.lacks_instance = False
        self.of_step = False
        self.after_steps = False

    @property
    def reason(self) -> str:
        """The text for state reasons and logs, such as `Invalid argument: no such field`."""
        return f"{self.code.value}: {self.message}"

    def again(self) -> "InferenceError":
        """The same error, for a caller that keeps this one.

        A raised error refers to all frames that it passes: one that a frame keeps would be a cycle
        with their data.
        """
        return self.within("")

    def within(self, prefix: str) -> "InferenceError":
        """The same error with a prefix of its text."""
        return InferenceError(self.code, prefix + self.message)


class AnsweredError(InferenceError):
    """An error that the model itself returns; the client receives it as any other error.

    In the statistics the request counts as successful, as on Triton.
    """


class RefusedError(InferenceError):
    """The refusal of a request by the process that hosts its model, before it is queued there.

    Where that process is this one, such an error is raised before there is a stream.
    """


class LostError(InferenceError):
    """The cancellation of a request whose router was lost, which ends it with an error of its own.

    It is no fault of the model.
    """

    def __init__(self) -> None:
        super().__init__(Code.CANCELLED, "its router was lost")


class RefusalReason(StrEnum):
    """The reason of a Refusal: it decides the statuses, by one table of each frontend.

    Guards refuse credentials that are missing or wrong, before there is a request.
    """

    RATE_LIMITED = "rate_limited"
    """A limit of the tenant."""
    OVERLOADED = "overloaded"
    """No room, or no instance, for requests of any tenant."""
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    """The predicted wait is longer than the time that the client gives."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The client's time has passed."""


IN_FLIGHT = "in_flight"
"""The limit of a tenant's requests at a time, as `RetryAdvice` names it."""
ROOM_SECS = 1.0
"""The wait that is advised for room, if its time is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAdvice:
    """The facts of a Refusal for its client.

    `retry_after_secs` is the time until a retry may succeed, 0 if it is unknown; with `retries`
    False none will. `predicted_wait_secs` is the wait that was too long, None without a prediction.
    `limit` names the limit of the tenant that was reached; `headers` are those of its limits.
    """

    retry_after_secs: float = 0.0
    retries: bool = True
    predicted_wait_secs: float | None = None
    limit: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(RefusedError):
    """A refusal with its reason, and with advice for a retry; its code is UNAVAILABLE."""

    def __init__(self, refusal_reason: RefusalReason, message: str, advice: RetryAdvice) -> None:
        super().__init__(Code.UNAVAILABLE, message)
        self.refusal_reason = refusal_reason
        self.advice = advice

    def within(self, prefix: str) -> "Refusal":
        """See `InferenceError`."""
        return Refusal(self.refusal_reason, prefix + self.message, self.advice)

    @property
    def of_caller(self) -> bool:
        """Whether a limit or a deadline of the caller is the reason, which says nothing of a model.

        The server is the reason of others.
        """
        return self.refusal_reason is not RefusalReason.OVERLOADED


class RetryLater(Refusal):
    """The refusal of a server without room: a retry may succeed after `secs`."""

    def __init__(self, message: str, secs: float = ROOM_SECS) -> None:
        super().__init__(RefusalReason.OVERLOADED, message, RetryAdvice(retry_after_secs=secs))


def died(message: str, instance: int = 0) -> InferenceError:
    """The error of a request whose instance has died while it executed it."""
    error = InferenceError(Code.UNAVAILABLE, message)
    error.dead_instance = instance
    return error


def no_instance(message: str) -> InferenceError:
    """The error of a request that was not executed, because there is no instance."""
    error = InferenceError(Code.UNAVAILABLE, message)
    error.lacks_instance = True
    return error


def exiting() -> InferenceError:
    """The refusal of a server that stops, with Triton's text."""
    return InferenceError(Code.UNAVAILABLE, "Server exiting")


def no_longer_valid() -> InferenceError:
    """The error of a request whose credential was revoked or has expired since it was sent."""
    return InferenceError(Code.CANCELLED, "the credential of the request is no longer valid")


def unexpected() -> InferenceError:
    """The error of a defect of the server, on every protocol."""
    return InferenceError(Code.INTERNAL, "internal error; the server's log says why")


FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")
"""The folders of an absolute path."""
SYSTEM_PACKAGES = {"libgomp.so.1": "libgomp1"}
"""Packages of Debian and Ubuntu with the libraries that wheels of runtimes expect of the system."""


def failed_import(what: str, error: Exception, fix: str = "") -> InferenceError:
    """UNAVAILABLE with the reason in one line, without folders of the host, and with the fix.

    A library of the system that is missing has a fix of its own.
    """
    text = " ".join(str(error).split())
    for library, package in SYSTEM_PACKAGES.items():
        if text.startswith(f"{library}: cannot open shared object file"):
            fix = f"on Debian and Ubuntu: apt-get install {package}"
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    reason = "; ".join(filter(None, (FOLDERS.sub("", text), fix)))
    return InferenceError(Code.UNAVAILABLE, f"{what} cannot be imported: {reason}")


def first_error(group: BaseException) -> BaseException:
    """The first error in a group, however deep; an error outside a group is returned itself."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
