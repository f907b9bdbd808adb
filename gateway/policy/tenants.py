"""The rules of tenants: their share of a model and their limits, as a key file has them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

MOST_TENANTS = 1024
"""Tables `[tenants.NAME]` of a key file."""
OTHER = "other"
"""The label of all tenants without a table, so that clients make no labels of metrics."""
MOST_TIMES = 2
"""All tenants together have at most as many times the limit of a model in flight."""
LEAST, MOST = 0.001, 1e12
"""Of a number that is no whole one: none is too small or too large to be divided by."""
MOST_WHOLE = 1_000_000_000


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
NO_TENANTS: Mapping[str, TenantRules] = MappingProxyType({})


class Ledger:
    """Events of requests in their order, whose accounts `take` makes later, all at once.

    An event is the record of a request: first its begin, then its end. All else that reads or
    changes these accounts calls `settle` before, so that none is ever late.
    """

    __slots__ = ("events", "note", "take")

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.note: Callable[[Any], None] = self.events.append
        self.take: Callable[[Sequence[Any]], None] | None = None

    def settle(self) -> None:
        """Take all events into account; without any it changes nothing."""
        if self.events and self.take is not None:
            events = self.events[:]
            self.events.clear()
            self.take(events)


class Tenants:
    """The rules of all tenants by their names, as the key file has them now.

    It is `configured` if any tenant has a table: `by_name` has their rules. `changes` is the number
    of replacements. The `ledger` has what their accounts do not have yet.
    """

    def __init__(self, rules: Mapping[str, TenantRules] = NO_TENANTS) -> None:
        self.by_name, self.configured = rules, bool(rules)
        self.changes = 0
        self.ledger = Ledger()

    @property
    def names(self) -> Collection[str]:
        """The tenants with a table."""
        return self.by_name.keys()

    def replace(self, rules: Mapping[str, TenantRules]) -> None:
        """Take the rules of a file that was read again; what is noted is of those before."""
        self.ledger.settle()
        self.by_name, self.configured = rules, bool(rules)
        self.changes += 1

    def rules(self, tenant: str) -> TenantRules:
        """The rules of a tenant; NO_RULES without a table."""
        return self.by_name.get(tenant, NO_RULES)

    def weight(self, tenant: str) -> float:
        """The weight of a tenant."""
        return self.by_name.get(tenant, NO_RULES).weight

    def label(self, tenant: str) -> str:
        """The label of a tenant in metrics."""
        return tenant if tenant in self.by_name else OTHER


def read_rules(members: Any) -> TenantRules:
    """The rules in a table; ValueError with the member, what was found and what was expected."""
    if not isinstance(members, dict):
        raise ValueError(f"found {_shown(members)}, expected a table")
    for name in members:
        if name not in READERS:
            raise ValueError(f"unknown field '{name}', expected {', '.join(READERS)}")
    found: dict[str, Any] = {name: READERS[name](name, members[name]) for name in members}
    return TenantRules(**found)


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and LEAST <= value <= MOST:
        return float(value)
    raise _wrong(name, value, f"a number from {LEAST:g} to {MOST:.0f}")


def _weight(name: str, value: Any) -> float:
    is_none = value == 0 and isinstance(value, int | float) and not isinstance(value, bool)
    return 0.0 if is_none else _number(name, value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_WHOLE:
        return value
    raise _wrong(name, value, f"a whole number from 1 to {MOST_WHOLE}")


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    zero = "0, or " if name == "weight" else ""
    return ValueError(f"'{name}' is {_shown(value)}, expected {zero}{expected}")


def _shown(value: Any) -> str:
    try:
        return (repr(value) if isinstance(value, str) else str(value))[:80]
    except ValueError:  # Python writes no numbers of more than 4,300 digits
        return "a number of thousands of digits"


OWN_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "weight": _weight,
    "max_in_flight": _whole,
    "highest_priority": _whole,
}
READERS: Mapping[str, Callable[[str, Any], Any]] = {
    each.name: OWN_READERS.get(each.name, _number) for each in fields(TenantRules)
}
"""The reader of each member of a table."""
