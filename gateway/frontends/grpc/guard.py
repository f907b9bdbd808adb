"""Access over gRPC: the metadata of a restricted area, a credential, and changes by strangers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from gateway.frontends.grpc.audit import GrpcAudit
from gateway.frontends.grpc.rpc import Guard, Method, RpcCall, RpcHead
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.policy.areas import (
    AREA_OF_METHOD,
    AREA_OF_METHOD_CHANGE,
    AREA_OF_SETTINGS,
    Area,
    area_at,
)
from gateway.policy.caller import address_of, caller_of
from gateway.policy.control import CHANGES, ChangeControl
from gateway.policy.credentials import (
    MAY_CHANGE,
    MAY_READ,
    METADATA,
    Access,
    Credentials,
    KeyRefusal,
    Reason,
)
from gateway.policy.keys import Role
from gateway.policy.restrictions import GRPC_PREFIX, Restriction

STATUS = {
    Reason.MALFORMED: StatusCode.INVALID_ARGUMENT,
    Reason.MISSING: StatusCode.UNAUTHENTICATED,
    Reason.WRONG: StatusCode.UNAUTHENTICATED,
    Reason.FORBIDDEN: StatusCode.PERMISSION_DENIED,
}


class GrpcRestriction:
    """The condition of one restricted area."""

    def __init__(self, restriction: Restriction) -> None:
        self._restriction = restriction
        self._name = GRPC_PREFIX + restriction.name
        shown = GRPC_PREFIX + restriction.shown
        self._message = f"This protocol is restricted, expecting header '{shown}'"

    def __call__(self, rpc: RpcHead) -> None:
        """Raise RpcError for an RPC without the metadata of the area."""
        values = (value for name, value in rpc.metadata if name == self._name)
        found = (each if isinstance(each, bytes) else each.encode() for each in values)
        if not self._restriction.allows(found):
            raise RpcError(StatusCode.UNAVAILABLE, self._message)


class GrpcControl:
    """The condition of the changes in one area."""

    def __init__(self, control: ChangeControl, area: Area) -> None:
        self._control = control
        self._area = area

    def __call__(self, rpc: RpcHead) -> None:
        """Raise RpcError for an RPC of a caller that may not change the server."""
        caller = caller_of(address_of(rpc.peer), _headers(rpc), self._control.hosts)
        refusal = self._control.refusal(self._area, caller)
        if refusal is not None:
            raise RpcError(StatusCode.PERMISSION_DENIED, refusal)


def _headers(rpc: RpcHead) -> Iterator[tuple[str, str]]:
    if rpc.authority:
        yield "host", rpc.authority
    for name, value in rpc.metadata:
        if isinstance(value, str):
            yield name, value


class GrpcKeys:
    """The condition that an RPC has a credential with one of some roles."""

    def __init__(self, credentials: Credentials, roles: frozenset[Role]) -> None:
        self._credentials = credentials
        self._roles = roles

    def __call__(self, rpc: RpcHead) -> None:
        """Set the caller of an RPC; raise RpcError for one without a credential.

        An RPC with the head of the last one has its caller already.
        """
        known, roles = rpc.caller, self._roles
        if known is not None and rpc.certificate is None:
            # As `remains_permitted`, without a call for most.
            lasts = known.valid and known.expires == inf and not roles.isdisjoint(known.roles)
            if lasts or known.remains_permitted(roles):
                return
        given = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in rpc.metadata
            if name in METADATA
        ]
        found = self._credentials.check(given, self._roles, rpc.certificate)
        if isinstance(found, KeyRefusal):
            rpc.caller = found.caller
            wait_secs = self._credentials.note("grpc", found)
            raise RpcError(STATUS[found.reason], found.message, wait_secs=wait_secs)
        rpc.caller = found


class GrpcAbsence:
    """The refusal of the changes in one area, which another port has."""

    def __init__(self, area: Area) -> None:
        self._message = f"{CHANGES[area]} is not offered at this port"

    def __call__(self, rpc: RpcHead) -> None:
        """Raise RpcError, as for a method that does not exist."""
        raise RpcError(StatusCode.UNIMPLEMENTED, self._message)


@dataclass(frozen=True, slots=True)
class GrpcAccess(Access):
    """The conditions of all methods."""

    def guarded(self, methods: Mapping[str, Method]) -> Mapping[str, Method]:
        """The offered methods with their conditions; LookupError for one without an area."""
        return {
            path: self._guarded(path, method)
            for path, method in methods.items()
            if self.changes or path not in AREA_OF_METHOD_CHANGE
        }

    def _guarded(self, path: str, method: Method) -> Method:
        area = area_at(path, AREA_OF_METHOD, "method")
        guards: list[Guard] = []
        if area in self.restrictions:
            guards.append(GrpcRestriction(self.restrictions[area]))
        if path in AREA_OF_METHOD_CHANGE:
            guards += self._of_change(area)
            return self._changing(path, area, replace(method, guard=_each_of(guards)))
        if self.credentials is not None and area in MAY_READ:
            guards.append(GrpcKeys(self.credentials, MAY_READ[area]))
        if path in AREA_OF_SETTINGS:
            changing = replace(method, guard=_each_of(self._of_change(area)))
            method = _with_settings(method, self._changing(path, area, changing))
        return replace(method, guard=_each_of(guards)) if guards else method

    def _changing(self, path: str, area: Area, method: Method) -> Method:
        """A method that changes the server, with lines in the audit log."""
        if self.audit is None or method.guard is None:
            return method
        audit = GrpcAudit(self.audit, area, path)
        serve, guard = audit.serving(method.serve), audit.guarding(method.guard)
        return replace(method, serve=serve, guard=guard)

    def _of_change(self, area: Area) -> list[Guard]:
        if not self.changes:
            return [GrpcAbsence(area)]
        control = GrpcControl(self.control_of_changes, area)
        if self.credentials is None:
            return [control]
        return [GrpcKeys(self.credentials, MAY_CHANGE), control]


def _each_of(guards: list[Guard]) -> Guard:
    if len(guards) == 1:
        return guards[0]

    def guard(rpc: RpcHead) -> None:
        for each in guards:
            each(rpc)

    return guard


def _with_settings(reading: Method, changing: Method) -> Method:
    """The reading method, but the changing one for messages that have settings."""

    async def serve(message: Any, call: RpcCall) -> Any:
        if not message.settings:
            return await reading.serve(message, call)
        if changing.guard is not None:
            changing.guard(call)
        return await changing.serve(message, call)

    return replace(reading, serve=serve)
