"""The rules of tenants: their share of a model and their limits, as a key file has them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRules:
    """The share of a tenant among those that wait, and its limits; None is no limit.

    `weight` 0 is served only while no other tenant waits. A bucket holds the limits of `burst`
    minutes. Tokens are those of prompts and answers, `compute_ms_per_minute` is in milliseconds of
    executions. `highest_priority` is the best priority of its requests: 1 is the best of all.
    """

    weight: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    compute_ms_per_minute: float | None = None
    burst: float = 1.0
    max_in_flight: int | None = None
    highest_priority: int = 1


NO_RULES = TenantRules()
"""The rules of a tenant without a table in the key file."""
