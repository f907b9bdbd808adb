"""Access over HTTP: the header of a restricted area, a credential, changes, and pages."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.frontends.http.audit import HttpAudit
from gateway.frontends.http.errors import plain_error
from gateway.frontends.http.request_scope import (
    CALLER,
    CERTIFICATE,
    NO_STATE,
    RequestState,
    Start,
    has_origin,
    write_whole,
)
from gateway.policy.areas import AREA_OF_ROUTE, AREA_OF_ROUTE_CHANGE, CHANGING, HTTP, Area, area_at
from gateway.policy.caller import caller_of
from gateway.policy.control import ChangeControl
from gateway.policy.credentials import (
    MAY_CHANGE,
    MAY_READ,
    NAMES,
    Access,
    Credentials,
    KeyRefusal,
    Reason,
)
from gateway.policy.keys import Role
from gateway.policy.pages import JSON, unfit_type, unknown_name
from gateway.policy.restrictions import Restriction

FORBIDDEN = HTTPStatus.FORBIDDEN.value
UNFIT = HTTPStatus.UNSUPPORTED_MEDIA_TYPE.value
STATUS = {
    Reason.MALFORMED: HTTPStatus.BAD_REQUEST.value,
    Reason.MISSING: HTTPStatus.UNAUTHORIZED.value,
    Reason.WRONG: HTTPStatus.UNAUTHORIZED.value,
    Reason.FORBIDDEN: FORBIDDEN,
}
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="sluice"'}
"""The header of 401 (RFC 9110, 11.6.1)."""


AnyRoute = TypeVar("AnyRoute", bound=Route)


class HttpRestriction:
    """The condition of one restricted area."""

    def __init__(self, restriction: Restriction) -> None:
        self._restriction = restriction
        self._header = restriction.name.encode()
        self._message = f"This API is restricted, expecting header '{restriction.shown}'"

    def allows(self, scope: Scope) -> bool:
        """Whether a request has the header of the area."""
        header = self._header
        return self._restriction.allows(value for name, value in scope["headers"] if name == header)

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The refusal of a request without it."""
        return None if self.allows(scope) else HTTPException(FORBIDDEN, self._message)


class KeyException(HTTPException):
    """The refusal of a credential, which is answered after `wait_secs`."""

    wait_secs: float

    @classmethod
    def after(cls, wait_secs: float, fault: KeyRefusal) -> "KeyException":
        """The refusal for a fault."""
        status = STATUS[fault.reason]
        challenge = CHALLENGE if status == HTTPStatus.UNAUTHORIZED else None
        found = cls(status, fault.message, challenge)
        found.wait_secs = wait_secs
        return found


def wait_secs(refusal: HTTPException) -> float:
    """The time in seconds after which a refusal is answered."""
    return refusal.wait_secs if isinstance(refusal, KeyException) else 0.0


class HttpKeys:
    """The condition that a request has a credential with one of some roles."""

    def __init__(self, credentials: Credentials, roles: frozenset[Role]) -> None:
        self._credentials = credentials
        self._roles = roles

    def allows(self, scope: Scope) -> bool:
        """Whether a request has one; its caller is then in the state of the request."""
        return self._fault(scope) is None

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The refusal of a request without one, which is counted; otherwise as `allows`."""
        fault = self._fault(scope)
        if fault is None:
            return None
        if fault.caller is not None:
            scope.setdefault("state", {})[CALLER] = fault.caller
        return KeyException.after(self._credentials.note("http", fault), fault)

    def _fault(self, scope: Scope) -> KeyRefusal | None:
        """The refusal; a request with the head of the last one has its caller already."""
        state: RequestState = scope.get("state", NO_STATE)
        known, certificate = state.get(CALLER), state.get(CERTIFICATE)
        if known is not None and certificate is None and known.remains_permitted(self._roles):
            return None
        given = [each for each in scope["headers"] if each[0] in NAMES]
        found = self._credentials.check(given, self._roles, certificate)
        if isinstance(found, KeyRefusal):
            return found
        scope.setdefault("state", {})[CALLER] = found
        return None


class HttpControl:
    """The condition of the changes in one area, and of the area of the admin."""

    def __init__(self, control: ChangeControl, area: Area) -> None:
        self._control = control
        self._area = area

    def allows(self, scope: Scope) -> bool:
        """Whether the caller of a request may change the server."""
        return self._found(scope) is None

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The refusal of one that may not."""
        found = self._found(scope)
        return None if found is None else HTTPException(FORBIDDEN, found)

    def _found(self, scope: Scope) -> str | None:
        caller = caller_of(_address(scope), _headers(scope), self._control.hosts)
        return self._control.refusal(self._area, caller)


class HttpPages:
    """The conditions of a POST by a page; those of programs, without `Origin`, meet them.

    A page of another origin sends a body of one of `types`. One of this server has reached it by a
    name of this machine; with `hosts` as None its name is not looked at.
    """

    def __init__(self, types: Collection[str], hosts: Collection[str] | None) -> None:
        self._types = types
        self._hosts = hosts

    def allows(self, scope: Scope) -> bool:
        """Whether a request meets the conditions."""
        return self.refusal(scope) is None

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The refusal of one that does not."""
        if scope["method"] != CHANGING or not has_origin(scope):
            return None
        headers = _headers(scope)
        if (text := unfit_type(headers, self._types)) is not None:
            return HTTPException(UNFIT, text)
        if self._hosts is None:
            return None
        _, port = scope.get("server") or ("", 0)
        text = unknown_name(_address(scope), port, headers, self._hosts)
        return None if text is None else HTTPException(FORBIDDEN, text)


def _address(scope: Scope) -> str:
    """The address of the client; uvicorn has none of a client that has reset its connection."""
    address, _ = scope.get("client") or ("", 0)
    return str(address)


def _headers(scope: Scope) -> Sequence[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


Condition = HttpRestriction | HttpKeys | HttpControl | HttpPages


class HttpGuard:
    """Several conditions of one route."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions = conditions

    def allows(self, scope: Scope) -> bool:
        """Whether a request meets all conditions."""
        return all(condition.allows(scope) for condition in self._conditions)

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The refusal by the first condition that a request does not meet."""
        for condition in self._conditions:
            refusal = condition.refusal(scope)
            if refusal is not None:
                return refusal
        return None


@dataclass(frozen=True, slots=True)
class HttpAccess(Access):
    """The conditions of all routes."""

    def offered(self, routes: Iterable[AnyRoute]) -> list[AnyRoute]:
        """Those of the routes that exist at this port."""
        return [each for each in routes if self.changes or not _is_of_admin(each)]

    def guard(self, area: Area) -> "Guard | None":
        """The guard of requests of an area that leave the server as it is."""
        return _guard(self._conditions(area, changes=False))

    def pages(self, *types: str) -> HttpPages:
        """The conditions of a page's POST with one of these types; an API key names no host."""
        return HttpPages(types, self.control.hosts if self.credentials is None else None)

    def guarded(self, routes: Iterable[Route]) -> list[BaseRoute]:
        """The offered routes with their conditions; LookupError for one without an area."""
        found: list[BaseRoute] = []
        pages = self.pages(JSON)
        for route in self.offered(routes):
            area = area_at(route.path, AREA_OF_ROUTE, "route")
            changes = changes_server(route)
            conditions = self._conditions(area, changes=changes)
            guard = _guard([*conditions, pages] if takes_posts(route) else conditions)
            audit = None
            if changes and self.audit is not None:
                audit = HttpAudit(self.audit, area, route.path)
            found.append(route if guard is None else GuardedRoute(route, guard, audit))
        return found

    def _conditions(self, area: Area, *, changes: bool) -> Sequence[Condition]:
        found: list[Condition] = []
        if area in self.restrictions:
            found.append(HttpRestriction(self.restrictions[area]))
        roles = MAY_CHANGE if changes else MAY_READ.get(area)
        if self.credentials is not None and roles:
            found.append(HttpKeys(self.credentials, roles))
        if changes or area is Area.ADMIN:
            found.append(HttpControl(self.control_of_changes, area))
        return found


Guard = Condition | HttpGuard


def _guard(conditions: Sequence[Condition]) -> Guard | None:
    if len(conditions) == 1:
        return conditions[0]
    return HttpGuard(conditions) if conditions else None


class GuardedRoute(BaseRoute):
    """A route with conditions; it refuses before it looks at the method, as Triton."""

    def __init__(self, route: Route, guard: Guard, audit: HttpAudit | None = None) -> None:
        self.path = route.path
        self.methods = route.methods
        self._route = route
        self._guard = guard
        self._audit = audit

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard.refusal(scope)
        if refusal is not None:
            if self._audit is not None:
                self._audit.refused(scope, refusal)
            await asyncio.sleep(wait_secs(refusal))
            raise refusal
        if self._audit is not None:
            await self._audit.handle(self._route.handle, scope, receive, send)
        else:
            await self._route.handle(scope, receive, send)


def changes_server(route: Route) -> bool:
    """Whether a route changes the server."""
    return takes_posts(route) and route.path in AREA_OF_ROUTE_CHANGE


def _is_of_admin(route: Route) -> bool:
    """Whether a route is at the admin ports only, where there are some."""
    return changes_server(route) or route.path in HTTP[Area.ADMIN]


def takes_posts(route: Route) -> bool:
    """Whether a route has the method by which requests have a body."""
    return route.methods is None or CHANGING in route.methods


def refused_response(refusal: HTTPException) -> Response:
    """The response of v2 to a refused request."""
    headers: Mapping[str, str] = refusal.headers or {}
    return plain_error(refusal.status_code, refusal.detail, dict(headers))


async def refuse(refusal: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request by its refusal, after its wait."""
    await asyncio.sleep(wait_secs(refusal))
    await refused_response(refusal)(scope, receive, send)


def answer_later(cycle: RequestResponseCycle, start: Start, refusal: HTTPException) -> None:
    """Refuse a whole request in a later turn of the event loop, after its wait.

    So requests that came together leave turns to other clients. It has a task only if its client
    has to read first.
    """
    cycle.body = bytearray()  # an idle connection keeps no body
    answer, loop = refused_response(refusal), asyncio.get_running_loop()
    loop.call_later(wait_secs(refusal), _answer, cycle, start, answer)


def _answer(cycle: RequestResponseCycle, start: Start, answer: Response) -> None:
    if cycle.disconnected or cycle.transport.is_closing():
        return
    if cycle.flow.write_paused:
        start(answer)
    else:
        write_whole(cycle, answer.raw_headers, [answer.body], answer.status_code)
