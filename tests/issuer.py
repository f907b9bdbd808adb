"""An issuer of JSON Web Tokens: its keys, its tokens, and its server of a key set."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from gateway.policy.key_set import KeySet, read_key_set
from gateway.policy.key_set_source import OnChange
from gateway.policy.watched_file import ReloadFailures

ISSUER = "https://issuer.example"
AUDIENCE = "sluice"


@cache
def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    """An RSA key, which takes long to make."""
    return rsa.generate_private_key(65537, bits)


PRIVATE_KEYS: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), rsa_key),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ES512": lambda: ec.generate_private_key(ec.SECP521R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class SigningKey:
    """A key of the issuer; `kid` is its name, if it has one."""

    def __init__(self, kid: str | None = "one", algorithm: str = "ES256") -> None:
        self.kid = kid
        self.algorithm = algorithm
        self.private = PRIVATE_KEYS[algorithm]()

    def jwk(self, **more: Any) -> dict[str, Any]:
        """The public key in a set; None leaves out a member."""
        public = get_default_algorithms()[self.algorithm].to_jwk(
            self.private.public_key(), as_dict=True
        )
        public.pop("key_ops", None)
        found = {**public, "kid": self.kid, **more}
        return {name: value for name, value in found.items() if value is not None}

    def token(self, headers: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """A token of the tenant `team` for inference; None leaves out a claim."""
        found = {**valid_claims(), **claims}
        given = {name: value for name, value in found.items() if value is not None}
        named = {} if self.kid is None else {"kid": self.kid}
        both = {**named, **(headers or {})}
        return jwt.encode(given, self.private, algorithm=self.algorithm, headers=both)


def valid_claims() -> dict[str, Any]:
    """The claims of a token for a minute."""
    exp = int(time.time()) + 60
    return {"iss": ISSUER, "aud": AUDIENCE, "exp": exp, "tenant": "team", "roles": ["infer"]}


def key_set(*keys: SigningKey) -> str:
    """The JWK set with these keys."""
    return json.dumps({"keys": [each.jwk() for each in keys]})


class HeldKeys:
    """A source of a key set that the test changes."""

    def __init__(self, *keys: SigningKey) -> None:
        self.keys = read_key_set(key_set(*keys))
        self.failures = ReloadFailures("refused")
        self.unknown = 0
        self._changed = asyncio.Event()

    def change(self, *keys: SigningKey) -> None:
        """Replace the set by another one."""
        self.keys = read_key_set(key_set(*keys)) if keys else KeySet()
        self._changed.set()

    async def follow(self, on_change: OnChange) -> None:
        """Call the function after each change."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await on_change()

    def note_unknown(self) -> None:
        """Count the call."""
        self.unknown += 1


Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(text: str | bytes, status: int = 200, **headers: str) -> Answer:
    """The answer with a body."""
    body = text if isinstance(text, bytes) else text.encode()

    def write(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return write


class IssuerServer(ThreadingHTTPServer):
    """A server on this machine that gives one answer, and counts its requests."""

    daemon_threads = True

    def __init__(self, given: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.answer = given
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        """The address of the key set."""
        return f"http://127.0.0.1:{self.server_port}/keys?secret=marker"


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: IssuerServer

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        try:
            self.server.answer(self)
        except OSError:
            self.close_connection = True  # the client has all it wants

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def issuer_server(given: Answer) -> Iterator[IssuerServer]:
    """A running server for the length of the block."""
    with IssuerServer(given) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
