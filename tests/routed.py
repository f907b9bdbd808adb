"""A client of HTTP whose requests go to any router of a fleet."""

import httpx

from tests.serving import Serving


class AnyRouter(httpx.HTTPTransport):
    """Sends each request to the address that a server has at that time."""

    def __init__(self, server: Serving) -> None:
        super().__init__()
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._server.ports["http"])
        return super().handle_request(request)
