"""The sender by which model.py answers a request from anywhere."""

from .constants import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from .errors import TritonModelException
from .open_requests import OpenRequest
from .response import InferenceResponse


class InferenceResponseSender:
    """Answers one request; usable from any thread, and after `execute` has returned."""

    __slots__ = ("_request",)

    def __init__(self, request: OpenRequest) -> None:
        self._request = request

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag or both; TritonModelException if that breaks a rule."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be an InferenceResponse, found {type(response)}")
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._request.send(response, flags)

    async def room(self) -> None:
        """Wait, in an event loop, while the reader lags too far behind; `send` does not there.

        Ours alone: Triton's senders have no such method.
        """
        await self._request.room()

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answers any more."""
        return self._request.cancelled
