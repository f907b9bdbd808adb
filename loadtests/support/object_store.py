"""A storage of objects on loopback, as S3 has them: listings, and objects with ranges, counted.

`python -m loadtests.support.object_store FOLDER PORT`: the folders in FOLDER are its buckets.
"""

import os
import re
import sys
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import gmtime, strftime
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

import orjson

from loadtests.support.servers import Launch, Ports, Server, free_ports

COUNTS = "/-/counts"
LISTED, CONTINUED = "listings", "further pages"
"""Counts of listings and of their further pages; others are bytes sent, by the object's path."""
PAGE = 1000
"""Objects of one listing, as those of S3 have."""


def object_store(folder: Path) -> Launch:
    """The start of a storage whose buckets are the folders in `folder`."""
    port = free_ports().http
    return Launch(
        name="objects",
        command=[sys.executable, "-m", "loadtests.support.object_store", str(folder), str(port)],
        ports=Ports(port, port, port),
        ready_path=COUNTS,
    )


def taken(storage: Server) -> Counter[str]:
    """The counts since the last call."""
    with urlopen(f"http://127.0.0.1:{storage.ports.http}{COUNTS}", timeout=10) as answer:
        return Counter(orjson.loads(answer.read()))


class _Objects(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()
    counts: ClassVar[Counter[str]] = Counter()
    lock = Lock()

    def do_GET(self) -> None:
        """A listing, an object or the counts."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == COUNTS:
            with self.lock:
                content = orjson.dumps(self.counts)
                self.counts.clear()
            self._send(content)
        elif "list-type" in query:
            self._count(CONTINUED if "continuation-token" in query else LISTED, 1)
            self._send(_listing(self.folder / url.path.strip("/"), query), "application/xml")
        else:
            self._send_object(unquote(url.path).strip("/"))

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """A line for each request takes processor time from the servers."""

    def _count(self, name: str, number: int) -> None:
        with self.lock:
            self.counts[name] += number

    def _send(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_object(self, path: str) -> None:
        try:
            file = (self.folder / path).open("rb")
        except OSError:
            self.send_error(404)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            first, last = 0, size - 1
            if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(asked[1]), min(int(asked[2] or last), last)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            else:
                self.send_response(200)
            found = os.fstat(file.fileno())
            self.send_header("ETag", _etag(found))
            self.send_header("Last-Modified", formatdate(found.st_mtime, usegmt=True))
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            if self.command == "GET" and first <= last:
                self._count(path, last + 1 - first)
                self.connection.sendfile(file, first, last + 1 - first)


def _etag(found: os.stat_result) -> str:
    return f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"'


def _listing(bucket: Path, query: dict[str, str]) -> bytes:
    """A page of the keys with a prefix; the token of the next page is the last key of this one."""
    prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
    files = {each.relative_to(bucket).as_posix(): each for each in bucket.rglob("*")}
    keys = sorted(
        key
        for key, file in files.items()
        if key.startswith(prefix) and key > after and file.is_file()
    )
    rows = [_row(key, files[key].stat()) for key in keys[:PAGE]]
    more = len(keys) > PAGE
    token = (
        f"<NextContinuationToken>{escape(keys[PAGE - 1])}</NextContinuationToken>" if more else ""
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}"
        "</ListBucketResult>"
    ).encode()


def _row(key: str, found: os.stat_result) -> str:
    changed = strftime("%Y-%m-%dT%H:%M:%S.000Z", gmtime(found.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
        f"<ETag>{escape(_etag(found))}</ETag><Size>{found.st_size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def main(folder: str, port: str) -> None:
    """Serve until a signal."""
    _Objects.folder = Path(folder)
    ThreadingHTTPServer(("127.0.0.1", int(port)), _Objects).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
