"""Requests to the management routes of a running server."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult

from gateway.errors import Code, InferenceError
from gateway.flags.label import API_KEY

LIMIT_SECS = 30.0


class ManagementClient:
    """Asks the server at `url`; its API key may be in `environment`."""

    def __init__(self, url: SplitResult, environment: Mapping[str, str]) -> None:
        self._url = url
        key = environment.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the answer. InferenceError if the server refuses, or does not answer."""
        place = self._url.geturl()
        encoded = None if body is None else json.dumps(body).encode()
        connection = self._connection()
        try:
            connection.request(method, self._url.path.rstrip("/") + path, encoded, self._headers)
            response = connection.getresponse()
            found = response.read()
        except (OSError, http.client.HTTPException) as error:
            text = f"no answer from {place}: {error or type(error).__name__}"
            raise InferenceError(Code.UNAVAILABLE, text) from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise InferenceError(Code.UNKNOWN, _reason(response.status, found))
        try:
            return json.loads(found) if found else None
        except ValueError:
            text = f"the server at {place} does not speak the v2 protocol"
            raise InferenceError(Code.UNKNOWN, text) from None

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
