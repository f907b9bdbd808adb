"""The fetch of a key set: one GET, within a time and a size.

It runs on the event loop, so that its time limit holds for every step, and cancelling it ends it
at once; a thread that waits for a slow issuer would do neither.
"""

import asyncio
import ssl

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.policy.key_file import KeyFileError
from gateway.policy.key_set import MAX_SET_BYTES
from gateway.policy.key_set_url import KeySetUrl

FETCH_SECS = 5.0
READ_BYTES = 64 * 1024
OK = 200
REQUEST = (
    "GET {target} HTTP/1.1\r\nHost: {authority}\r\nAccept: application/json\r\n"
    "User-Agent: sluice\r\nConnection: close\r\n\r\n"
)


class _Answer:
    """The final response to a request; httptools calls the methods."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self.status = 0
        self.body = bytearray()
        self.is_complete = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the connection; HttpParserError if they are malformed."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= OK else 0

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = self.status != 0


async def fetch(url: KeySetUrl) -> str:
    """The text behind a URL. KeyFileError if its server does not give it.

    Redirects are not followed, no proxy is used, and certificates are checked.
    """
    try:
        async with asyncio.timeout(FETCH_SECS):
            answer = await _get(url)
    except TimeoutError:
        raise KeyFileError(f"it was not received within {FETCH_SECS:g} s") from None
    except OSError as error:
        raise KeyFileError(f"it cannot be fetched: {error.strerror or error}") from None
    except (HttpParserError, HttpParserUpgrade) as error:
        raise KeyFileError(f"the answer is no HTTP response: {error}") from None
    try:
        return answer.decode()
    except UnicodeDecodeError:
        raise KeyFileError("it is no UTF-8 text") from None


async def _get(url: KeySetUrl) -> bytearray:
    context = await asyncio.to_thread(ssl.create_default_context) if url.is_secure else None
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context)
    try:
        request = REQUEST.format(target=url.target, authority=url.authority)
        writer.write(request.encode())
        return await _read(reader)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytearray:
    """The body of a response; without a length it ends with the connection."""
    answer, size = _Answer(), 0
    while not answer.is_complete and (data := await reader.read(READ_BYTES)):
        answer.feed(data)
        if answer.status not in (0, OK):
            raise KeyFileError(f"its server answers with status {answer.status}, expected {OK}")
        size += len(data)
        if size > MAX_SET_BYTES:
            raise KeyFileError(f"it has more than {MAX_SET_BYTES} bytes")
    if not answer.status:
        raise KeyFileError("its server closed the connection before it answered")
    return answer.body
