"""The connection to a collector by HTTP, and its answers."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from socket import socket
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from requests import Request, Session
from requests.structures import CaseInsensitiveDict
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.util.proxy import connection_requires_http_tunnel

MOST_ANSWER_BYTES, MOST_ANSWER_SECS = 16 * 1024, 2.0
"""An answer of a collector that is longer, or takes longer, says nothing of its spans."""
MOST_HEAD_BYTES = 64 * 1024
PROTOBUF = "application/x-protobuf"
FINAL = 200
"""The first status of an answer behind which no other one follows."""
SLACK_SECS = 0.1
"""A difference of time limits for which the limit of a socket is not set again."""


class CollectorAnswer:
    """The latest answer of a collector; read it in the thread that sends.

    The status of an answer counts without its `body`: one that is too long or too slow, breaks off
    or has another type than protobuf is as an empty one.
    """

    def __init__(self) -> None:
        self.body = b""

    def follow(self, session: Session) -> None:
        """Read all answers of a session of `requests`."""
        session.stream = True  # bodies are read here only
        session.hooks["response"].append(lambda response, *_, **__: self.read(response.raw))

    def read(self, response: BaseHTTPResponse) -> None:
        """Read an answer, and return its connection."""
        self.body = b""
        with response, suppress(OSError, HTTPError):
            body, until = b"", time.monotonic() + MOST_ANSWER_SECS
            while piece := response.read1(MOST_ANSWER_BYTES, decode_content=True):
                body += piece
                if len(body) > MOST_ANSWER_BYTES or time.monotonic() > until:
                    return
            self.take(response.headers.get("Content-Type", ""), body)

    def take(self, kind: str, body: bytes) -> None:
        """Take the body of an answer that was read as a whole, with its type."""
        self.body = body if kind.partition(";")[0].strip() == PROTOBUF else b""


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """The end of a request, as the client of the SDK reads it: an answer, or an error."""

    status_code: int | None = None
    reason: str | None = None
    error: Exception | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> Mapping[str, str]:
        """The headers, by their names in lower case."""
        return self.fields


class ReadAnswer:
    """An answer of HTTP as it arrives; httptools calls its methods.

    `status` is that of its head, once that is whole, `size` the bytes read. `is_whole` once its
    body is; then `is_kept` is whether its connection may have another request.
    """

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self.status = self.size = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_whole = self.is_kept = False

    def read(self, connected: socket) -> None:
        """Wait for the next bytes, and read them; ProtocolError if they are malformed."""
        data = connected.recv(MOST_ANSWER_BYTES)
        self.size += len(data)
        if not data:
            self._end()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self.is_whole:  # further bytes, which answer no request
                self.is_kept = False
                return
            raise ProtocolError(f"the answer is no HTTP response: {error}") from error

    def _end(self) -> None:
        """Note that the connection has ended, as does a body without a length."""
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.status or has_length:
            raise ProtocolError("the connection was closed before the end of the answer")
        self.is_whole = True

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise ProtocolError("the answer is followed by another one")

    def on_status(self, text: bytes) -> None:
        self.reason += text.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= FINAL:
            self.status = status
        else:
            self.reason = ""
            self.headers.clear()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_whole = self.status != 0
        self.is_kept = self.is_whole and self._parser.should_keep_alive()


class KeptConnection:
    """Requests to one URL on one connection, with a head that is written once.

    It is a transport of the SDK's client, which sends a request again whose connection was closed.

    Under load there are a hundred per second. `requests` and `urllib3`, which would write and read
    a head for each, make the connection: with proxies, certificates, and passwords of `.netrc`.
    """

    def __init__(
        self, session: Session, url: str, headers: Mapping[str, str], answer: CollectorAnswer
    ) -> None:
        self._session = session
        self._request = Request("POST", url, headers=headers)
        self._answer = answer
        self._connection: Any = None
        self._limit_secs = 0.0
        self._busy, self._is_closed = Lock(), False

    @cached_property
    def _target(self) -> tuple[Any, bytes]:
        """The pool that makes connections, and the head of each request up to its length."""
        session = self._session
        request = session.prepare_request(self._request)
        url = request.url or ""
        found = session.merge_environment_settings(url, {}, None, None, None)
        proxies, verify, certificate = (found[name] for name in ("proxies", "verify", "cert"))
        adapter: Any = session.get_adapter(url)
        pool = adapter.get_connection_with_tls_context(request, verify, proxies, certificate)
        adapter.cert_verify(pool, url, verify, certificate)
        headers = CaseInsensitiveDict[Any](Host=urlsplit(url).netloc.rpartition("@")[2])
        headers.update(request.headers)
        if not _has_tunnel(pool):
            headers.update(pool.proxy_headers)
        headers["Accept-Encoding"] = "identity"
        del headers["Content-Length"]  # that of a request without a body
        lines = [f"POST {adapter.request_url(request, proxies)} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return pool, "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        data: bytes | None = None,
    ) -> CollectorResult:
        """The result of a request, of which the SDK's client changes the data only."""
        try:
            with self._busy:
                if self._is_closed:
                    return CollectorResult(error=ConnectionAbortedError("the exporter is closed"))
                return self._exchange(data or b"", timeout or 0.0)
        finally:
            if self._is_closed:  # meanwhile
                self._disconnect()

    def _exchange(self, body: bytes, limit_secs: float) -> CollectorResult:
        """The answer to a body; its write, and each read, has that time."""
        pool, head = self._target
        try:
            connected = self._connected(pool, limit_secs)
            with suppress(BrokenPipeError, ConnectionResetError):  # behind an early answer
                connected.sendall(b"%b%d\r\n\r\n%b" % (head, len(body), body))
            answer = _read_answer(connected, limit_secs)
        except (HTTPError, OSError) as error:
            self._disconnect()
            return CollectorResult(error=error)
        if not answer.is_kept:
            self._disconnect()
        is_read = answer.is_whole and len(answer.body) <= MOST_ANSWER_BYTES
        self._answer.take(answer.headers.get("content-type", ""), answer.body if is_read else b"")
        return CollectorResult(answer.status, answer.reason, fields=answer.headers)

    def _connected(self, pool: Any, limit_secs: float) -> socket:
        """The socket of the connection; a read or write has that time."""
        if self._connection is not None and not self._connection.is_connected:
            self._disconnect()  # it has ended, or has bytes that answer no request
        if self._connection is None:
            self._connection = pool._new_conn()  # noqa: SLF001
            self._connection.timeout = self._limit_secs = limit_secs
            if _has_tunnel(pool):
                pool._prepare_proxy(self._connection)  # noqa: SLF001
            else:
                self._connection.connect()
        found: socket = self._connection.sock
        if abs(self._limit_secs - limit_secs) > SLACK_SECS:
            self._limit_secs = limit_secs
            found.settimeout(limit_secs)
        return found

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def is_connection_error(self, exception: Exception | None) -> bool:
        """Whether a request has failed before its answer; the collector may have closed before."""
        return isinstance(exception, HTTPError | OSError)

    def close(self) -> None:
        """Refuse further requests, and close the connection; one in use is closed by its thread.

        An answer that is read to its end, however late, is no reason to send its spans again.
        """
        self._is_closed = True
        if self._busy.acquire(blocking=False):
            self._disconnect()
            self._busy.release()
        self._session.close()


def _has_tunnel(pool: Any) -> bool:
    """Whether connections of a pool are through a proxy that does not read the requests."""
    needed = connection_requires_http_tunnel(pool.proxy, pool.proxy_config, pool.scheme)
    return pool.proxy is not None and needed


def _read_answer(connected: socket, limit_secs: float) -> ReadAnswer:
    """The next answer; its body is not whole if it is too long, too slow or broken off."""
    answer = ReadAnswer()
    until = time.monotonic() + limit_secs
    while not answer.status:
        if answer.size > MOST_HEAD_BYTES or time.monotonic() > until:
            raise ProtocolError("the head of the answer is too long, or took too long")
        answer.read(connected)
    until = time.monotonic() + MOST_ANSWER_SECS
    with suppress(OSError, ProtocolError):
        while not answer.is_whole and len(answer.body) <= MOST_ANSWER_BYTES:
            if time.monotonic() > until:
                break
            answer.read(connected)
    return answer
