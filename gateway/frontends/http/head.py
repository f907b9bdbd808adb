"""Requests that are refused by their head, before their body is read."""

from dataclasses import replace

from starlette.types import Scope

from gateway.dataplane import DataPlane
from gateway.errors import Refusal
from gateway.frontends.http.connection_parts import has_late_body
from gateway.frontends.http.errors import CLOSING
from gateway.frontends.http.request_scope import IDEMPOTENCY_KEY, caller_in
from gateway.models.model import Model

KEY_HEADER = IDEMPOTENCY_KEY.encode()
"""A request with it is not refused by its head: one that was made before costs nothing."""


def check_head(dataplane: DataPlane, scope: Scope, model: Model | None = None) -> None:
    """Refuse a request if a limit of its tenant will refuse it; raises Refusal.

    The connection closes behind the answer if the body is long. `model` is None if the body has its
    name.
    """
    headers = dict(scope["headers"])
    if KEY_HEADER in headers:
        return
    try:
        dataplane.check_head(caller_in(scope), model)
    except Refusal as error:
        if not has_late_body(headers):
            raise
        advice = replace(error.advice, headers={**error.advice.headers, **CLOSING})
        raise Refusal(error.refusal_reason, error.message, advice) from None
