"""Data planes with limits of tenants, and a time that tests set."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.admission.admission import Admission
from gateway.admission.quotas import LimitKind
from gateway.dataplane import DataPlane
from gateway.errors import Refusal
from gateway.messages import InferResponse, Usage
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from tests.builders import LoadedModels, text_request, text_response


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.secs = 1000.0

    def __call__(self) -> float:
        return self.secs


class Gateway:
    """A data plane with one model, and an admission by these rules."""

    def __init__(self, model: Model, **rules: TenantRules) -> None:
        self.clock = Clock()
        self.tenants = Tenants(rules)
        self.admission = Admission(self.tenants, self.clock, lambda: 1.25)
        self.dataplane = DataPlane(LoadedModels(model))  # type: ignore[arg-type]
        self.dataplane.admission = self.admission

    def infer(self, text: str = "hell", tenant: str = "a", **parameters: Any) -> Any:
        caller = Caller(tenant=tenant)
        return self.dataplane.infer(text_request(text, caller=caller, parameters=parameters))

    def refused(self, *given: Any, **parameters: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.infer(*given, **parameters)
        return caught.value

    def left(self, kind: LimitKind, tenant: str = "a") -> float:
        """The units in a bucket."""
        found = {each["tenant"]: each for each in self.admission.describe()}
        units: float = found[tenant]["buckets"][kind]["remaining"]
        return units

    def in_flight(self, tenant: str = "a") -> int:
        found = {each["tenant"]: each for each in self.admission.describe()}
        count: int = found[tenant]["in_flight"]
        return count


TOKENS = TenantRules(tokens_per_minute=6000.0)


def answer(prompt: int, tokens: int, cached: int | None = None) -> InferResponse:
    usage = Usage(prompt, tokens, cached_tokens=cached)
    return replace(text_response("x", final=True), usage=usage)
