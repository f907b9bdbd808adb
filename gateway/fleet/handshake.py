"""The handshake of a connection of a router to a replica or another router.

Each end sends HELLO, then PROOF: HMAC-SHA256 of the nonces of both ends, keyed with the secret.
"""

import hashlib
import hmac
import platform
import secrets
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway import __version__
from gateway.fleet.choice import Location
from gateway.policy.caller import shown
from gateway.processes.channel import Frame, FrameKind

PROTOCOL = 1
NONCE_BYTES = 32
HANDSHAKE_SECS = 5.0
"""Time limit of the handshake, from the connection to the last frame."""
HANDSHAKE_BYTES = 4096
"""Longest frame before the end of the handshake: an unknown sender takes no more memory."""
MESSAGE_BYTES = 256 << 20
"""Longest frame after it: a message without its large tensors."""
SHOWN_CHARS = 300
NAME_CHARS = 6
"""The characters of a router's id with which its tokens begin."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal in all containers of a machine, and another one after each start of it."""

FleetId = Annotated[str, Meta(min_length=NAME_CHARS, max_length=32)]
"""The id of a process of a fleet."""
_Place = Annotated[str, Meta(max_length=63)]


@cache
def this_machine() -> str:
    """An id of this machine."""
    try:
        found = BOOT_ID.read_bytes()
    except OSError:
        found = platform.node().encode()
    return blake2b(found, digest_size=8).hexdigest()


class FleetKind(FrameKind):
    """Kinds of frames to a replica or another router; the connecting end numbers the calls."""

    HELLO = 32  # `Hello`: the first frame of each end
    PROOF = 33  # that this end has the secret; empty without one
    REFUSAL = 34  # the reason, as text: the sender closes the connection
    OFFERS = 35  # `Offers`: the state of a replica and its models; replaces the last one
    LOAD = 36  # `Load`: absolute counts of a replica
    PREFIXES = 37  # `KeyChanges`: the prefixes of prompts that a replica gained and lost
    COPY = 38  # `ConversationCopy`: a conversation after a turn
    ROUTERS = 40  # the table of the routers that listen for others; replaces the last one
    SUSPECTS = 41  # `SharedSuspect`s: requests that were executing when processes ended
    BULK = 48  # the replica receives large tensors on their connection from now on
    TENSOR = 49  # `bulk.ANNOUNCEMENT`: the next large tensor of a message of the call
    LARGE_REQUEST = 50  # starts a call: the number of large tensors, and a request without them
    LARGE_DATA = 51  # the same for a response
    LARGE_COPY = 52  # the same for a copy, whose messages are the large tensor
    RELAY = 56  # starts a call of a router at another one: `Relay`
    RELAYED = 57  # `Relayed`: the recording whose responses follow
    INTERRUPT = 58  # ends the request of a relayed recording, as a cancellation by its id
    CANCEL = 59  # starts a call of a router at another one: a `RequestName` to cancel
    CANCELLED = 60  # ends it: whether a request of that name ran there


class FleetRole(StrEnum):
    """The ends of a connection."""

    ROUTER = "router"
    REPLICA = "replica"
    CALLING = "calling router"
    CALLED = "called router"


OTHER_END = {
    FleetRole.ROUTER: FleetRole.REPLICA,
    FleetRole.REPLICA: FleetRole.ROUTER,
    FleetRole.CALLING: FleetRole.CALLED,
    FleetRole.CALLED: FleetRole.CALLING,
}
"""The role that each one expects of the other end."""


class Hello(msgspec.Struct):
    """The first frame of an end, as JSON; fields are only added at the end, with defaults.

    `link` is empty, or the nonce of the replica on the connection whose large tensors this one has.
    `port` is that of a router for other routers, 0 for none. If `final_ends`, a response with the
    final flag, but without large tensors, ends a call for this end: it needs no END behind it.
    `node` and `zone` are those of its `Location`. If `settles`, this end sends GONE for every turn
    of a conversation.
    """

    protocol: int
    sluice: str
    fleet: str
    role: str
    id: FleetId
    nonce: str
    secret: bool
    link: str = ""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    final_ends: bool = False
    node: _Place = ""
    zone: _Place = ""
    settles: bool = False

    @property
    def location(self) -> Location:
        """The place of the end."""
        return Location(self.node, self.zone)


class HandshakeError(Exception):
    """The other end cannot be talked to; the text is the reason."""


_read_hello = msgspec.json.Decoder(Hello).decode
_write_hello = msgspec.json.Encoder().encode


class Identity:
    """This process in a fleet: its name of the fleet, its role, an id of its own, the secret.

    `port` is that of a router for other routers, 0 for none. `location` is this machine, in a zone.
    """

    def __init__(self, fleet: str, role: FleetRole, secret: bytes = b"", *, zone: str = "") -> None:
        self.fleet = fleet
        self.location = Location(this_machine(), zone)
        self.role = role
        self.secret = secret
        self.id = secrets.token_hex(8)
        self.port = 0

    def at(self, role: FleetRole) -> "Identity":
        """The same process at another kind of connection."""
        found = Identity(self.fleet, role, self.secret, zone=self.location.zone)
        found.id = self.id
        return found


class Handshake:
    """One end of a handshake; `take` gets each frame until `peer` is set. `link` as in `Hello`."""

    def __init__(self, identity: Identity, link: str = "") -> None:
        self._identity = identity
        self.link = link
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self._hello: Hello | None = None
        self.peer: Hello | None = None

    def hello(self) -> bytes:
        """The payload of this end's HELLO."""
        own = self._identity
        return _write_hello(
            Hello(
                protocol=PROTOCOL,
                sluice=__version__,
                fleet=own.fleet,
                role=own.role,
                id=own.id,
                nonce=self.nonce,
                secret=bool(own.secret),
                link=self.link,
                port=own.port,
                final_ends=True,
                node=own.location.node,
                zone=own.location.zone,
                settles=True,
            )
        )

    def take(self, frame: Frame) -> bytes | None:
        """Check a frame of the other end; the payload of a PROOF to send, if it was HELLO.

        Raises HandshakeError, whose text the other end may see.
        """
        if frame.kind == FleetKind.REFUSAL:
            reason = shown(frame.payload.decode("utf-8", "replace"), SHOWN_CHARS)
            raise HandshakeError(f"refused by the other end: {reason}")
        if frame.kind == FleetKind.HELLO and self._hello is None:
            self._hello = self._checked(frame.payload)
            self.link = self.link or self._hello.link
            return self._proof(self._identity.role, self.nonce, self._hello.nonce)
        if frame.kind == FleetKind.PROOF and self._hello is not None:
            expected = self._proof(FleetRole(self._hello.role), self._hello.nonce, self.nonce)
            if not hmac.compare_digest(expected, frame.payload):
                raise HandshakeError("the secrets of the two ends differ (--fleet-secret-file)")
            self.peer = self._hello
            return None
        raise HandshakeError(f"found a frame of kind {frame.kind}, expected HELLO, then PROOF")

    def _checked(self, payload: bytes) -> Hello:
        try:
            found = _read_hello(payload)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"HELLO cannot be read: {error}") from None
        own = self._identity
        if found.protocol != PROTOCOL:
            raise HandshakeError(f"found protocol {found.protocol}, expected {PROTOCOL}")
        if found.fleet != own.fleet:
            raise HandshakeError(f"found fleet '{shown(found.fleet)}', expected '{own.fleet}'")
        expected = OTHER_END[own.role]
        if found.role != expected:
            raise HandshakeError(f"found a {shown(found.role)}, expected a {expected}")
        if found.secret != bool(own.secret):
            with_secret, without = ("other", "this") if found.secret else ("this", "other")
            raise HandshakeError(
                f"the {with_secret} end has a secret and the {without} end has none: both need "
                "--fleet-secret-file, with the same content"
            )
        return found

    def _proof(self, role: FleetRole, own: str, other: str) -> bytes:
        """The proof of the end with that role and nonce."""
        secret = self._identity.secret
        if not secret:
            return b""
        message = f"sluice {PROTOCOL} {role} {own} {other} {self.link}".encode()
        return hmac.new(secret, message, hashlib.sha256).digest()
