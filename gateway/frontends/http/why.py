"""The route that says where the time of an ended request went."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.request_scope import tenant_in
from gateway.observability.escaping import escaped_json


class WhyRoutes:
    """`/admin/why/{request_id}`; an id may contain slashes."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._receipts = dataplane.receipts

    def routes(self) -> list[DocumentedRoute]:
        """The route."""
        return [DocumentedRoute("GET", "/admin/why/{request_id:path}", self.why)]

    async def why(self, request: Request) -> Response:
        """The times of an ended request with a receipt, in words and in numbers.

        The latest 1,000 requests of a tenant are known.
        """
        request_id = request.path_params["request_id"]
        found = self._receipts.why(tenant_in(request.scope), request_id)
        if found is None:
            raise InferenceError(
                Code.NOT_FOUND,
                f"no receipt of a request with the id '{request_id}' is kept; it is kept for a "
                "request with an id whose client asks for it (x-want-timing: 1), or for each one "
                "with an id if the server has --server-timing=true",
            )
        return Response(escaped_json(found), media_type=JSON)
