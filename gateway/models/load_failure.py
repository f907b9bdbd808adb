"""Why has a model not been loaded? Triton's texts."""

from gateway.errors import Code, InferenceError
from gateway.models.dependencies import Circle
from gateway.models.lookup import Known


class LoadFailure(InferenceError):
    """A load has failed; `why` is what an ensemble that needs the model says of it.

    `circle` is there if ensembles that need one another are the reason.
    """

    def __init__(self, code: Code, message: str, why: str, circle: Circle | None = None) -> None:
        super().__init__(code, message)
        self.why = why
        self.circle = circle


def failed(name: str, why: str, circle: Circle | None = None) -> LoadFailure:
    """A version cannot be loaded, or what an ensemble calls is absent, or does not suit it."""
    return LoadFailure(Code.INVALID_ARG, f"load failed for model '{name}': {why}\n", why, circle)


def unread(name: str, why: str) -> LoadFailure:
    """The load never began: the model is absent, or its config is no good."""
    text = f"failed to load '{name}', failed to poll from model repository: {why}"
    return LoadFailure(Code.INTERNAL, text, why)


def cause(error: InferenceError) -> str:
    """What is wrong, without what has become of the load."""
    return error.why if isinstance(error, LoadFailure) else error.message


def member_failed(ensemble: str, member: Known, error: InferenceError) -> LoadFailure:
    """What the failure of a member is for an ensemble that needs it."""
    circle = error.circle if isinstance(error, LoadFailure) else None
    circle = error if isinstance(error, Circle) else circle
    if circle is not None and ensemble in circle.names:
        circle = circle.seen_from(ensemble)
        return failed(ensemble, circle.message, circle)
    why = cause(error)
    needs = f"ensemble '{ensemble}' depends on '{member.id.name}'"
    if member.members:
        how = f"which is not valid. Model '{member.id.name}' failed with error: {why}"
    else:
        how = f"which has no loaded version. Model '{member.id.name}' loading failed with error: "
        how += why
    return failed(ensemble, f"{needs} {how}")
