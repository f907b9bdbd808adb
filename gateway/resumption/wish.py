"""Does a request ask for a stream that can be resumed?"""

from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest

RESUMABLE = "resumable"
"""The request parameter that asks for it; no model gets to see it."""


def without_wish(request: InferRequest) -> tuple[InferRequest, bool]:
    """The request as the model gets it, and whether its stream is to be resumable.

    INVALID_ARG if the parameter is no truth value.
    """
    if RESUMABLE not in request.parameters:
        return request, False
    parameters = dict(request.parameters)
    wish = parameters.pop(RESUMABLE)
    if not isinstance(wish, bool):
        raise InferenceError(
            Code.INVALID_ARG, f"parameter '{RESUMABLE}' is {wish!r}, expected true or false"
        )
    return replace(request, parameters=parameters), wish
