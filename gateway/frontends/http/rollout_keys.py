"""Keys of rollouts in requests over HTTP, and the version in answers of OpenAI's endpoints."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.messages import NO_PARAMETERS, InferRequest
from gateway.models.model import Model, VersionChooser

MODEL_VERSION = "x-sluice-model-version"


def keyed(
    request: InferRequest,
    chooser: VersionChooser,
    scope: Scope,
    members: Mapping[str, Any] = NO_PARAMETERS,
) -> InferRequest:
    """The request with the headers and members that a rollout uses as key."""
    if not chooser.has_keys:
        return request
    return chooser.keyed(request, Headers(scope=scope).get, members)


def version_header(model: Model) -> Mapping[str, str]:
    """The version that answers, while a rollout chooses it: OpenAI's bodies have none."""
    return {MODEL_VERSION: model.version}
