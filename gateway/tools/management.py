"""Requests to the management routes of a running server."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import SplitResult

from gateway.errors import Code, InferenceError
from gateway.policy.keys import API_KEY

LIMIT_SECS = 30.0


class ManagementClient:
    """Asks the server at `url`; its API key may be in `environment`."""

    def __init__(self, url: SplitResult, environment: Mapping[str, str]) -> None:
        self._url = url
        key = environment.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the answer. InferenceError if the server refuses, or does not answer."""
        with self._answer(method, path, body) as response:
            found = response.read()
            return self._parsed(found) if found else None

    def lines(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The JSON of each line of the answer to a POST, as they come; raises as `ask`."""
        with self._answer("POST", path, body) as response:
            while line := response.readline():
                yield self._parsed(line)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        encoded = None if body is None else json.dumps(body).encode()
        with closing(self._connection()) as connection:
            try:
                connection.request(
                    method, self._url.path.rstrip("/") + path, encoded, self._headers
                )
                response = connection.getresponse()
                if response.status != http.HTTPStatus.OK:
                    text = _reason(response.status, response.read())
                    raise InferenceError(Code.UNKNOWN, text)
                yield response
            except (OSError, http.client.HTTPException) as error:
                place = self._url.geturl()
                text = f"no answer from {place}: {error or type(error).__name__}"
                raise InferenceError(Code.UNAVAILABLE, text) from None

    def _parsed(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            place = self._url.geturl()
            reason = f"the server at {place} does not speak the v2 protocol"
            raise InferenceError(Code.UNKNOWN, reason) from None

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=LIMIT_SECS)
        return http.client.HTTPConnection(host, port, timeout=LIMIT_SECS)


def _reason(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"
