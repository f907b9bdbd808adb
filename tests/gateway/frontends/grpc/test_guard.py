"""Conditions of methods: the peer, the authority and the metadata of an RPC decide."""

import pytest

from gateway.frontends.grpc.guard import GrpcAccess, GrpcControl, GrpcKeys
from gateway.frontends.grpc.rpc import Method, RpcCall, RpcHead
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.control import ChangeControl
from gateway.policy.credentials import MAY_READ, Credentials
from gateway.policy.keys import Role
from gateway.policy.restrictions import Restriction
from gateway.protos import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService"
LOG, LOAD, INFER = (
    f"{SERVICE}/{each}" for each in ("LogSettings", "RepositoryModelLoad", "ModelInfer")
)
LOCAL, REMOTE = "ipv4:127.0.0.1:4000", "ipv4:10.0.0.5:4000"
CLOSED, OPEN = ChangeControl(), ChangeControl(is_open=True)


class Head(RpcHead):
    """The head of an RPC."""

    def __init__(self, peer: str, authority: str = "", metadata: Metadata = ()) -> None:
        super().__init__()
        self._peer = peer
        self._authority = authority
        self._metadata = metadata

    @property
    def metadata(self) -> Metadata:
        return self._metadata

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def authority(self) -> str:
        return self._authority


def refusal(head: Head, control: ChangeControl = CLOSED) -> str | None:
    try:
        GrpcControl(control, Area.MODEL_REPOSITORY)(head)
    except RpcError as error:
        return error.details if error.status is StatusCode.PERMISSION_DENIED else error.status.name
    return None


@pytest.mark.parametrize("peer", [LOCAL, "ipv6:%5B::1%5D:4000", "ipv6:[::1]:4000", "unix:/s"])
@pytest.mark.parametrize("authority", ["", "localhost:8001", "127.0.0.1:8001"])
def test_a_change_of_this_machine_is_answered(peer: str, authority: str) -> None:
    assert refusal(Head(peer, authority, [("trace-bin", b"\xff")])) is None


def test_the_authority_at_a_unix_socket_may_be_its_path() -> None:
    assert refusal(Head("unix:", "run%2Fsluice")) is None
    assert refusal(Head("unix:", "run%2Fsluice", [("via", "1.1 a")]))
    assert refusal(Head("unix:", "run%2Fsluice", [("origin", "null")]))


@pytest.mark.parametrize(
    "head",
    [
        Head(REMOTE, "localhost:8001"),
        Head("", "localhost:8001"),
        Head(LOCAL, "evil.example"),
        Head(LOCAL, "localhost:8001", [("x-forwarded-for", "127.0.0.1")]),
        Head(LOCAL, "", [("via", "1.1 a")]),
        Head(LOCAL, "", [("host", "evil.example")]),
    ],
)
def test_a_change_of_another_machine_or_of_an_unknown_peer_is_refused(head: Head) -> None:
    text = "loading and unloading models is answered to this machine only"
    assert (refusal(head) or "").startswith(text)
    assert refusal(head, OPEN) is None


@pytest.mark.parametrize("control", [CLOSED, OPEN])
def test_a_page_of_another_origin_is_refused_always(control: ChangeControl) -> None:
    own = Head(LOCAL, "localhost:8001", [("origin", "http://localhost:8001")])
    assert refusal(own, control) is None
    for authority in ("localhost:8001", ""):
        foreign = Head(LOCAL, authority, [("origin", "http://a")])
        assert "found Origin 'http://a'" in (refusal(foreign, control) or "")


def test_an_allowed_host_is_this_machine() -> None:
    control = ChangeControl(hosts=frozenset({"a.example"}))
    assert refusal(Head(LOCAL, "A.example:8001"), control) is None


async def served(message: object, call: RpcCall) -> object:
    return message


def method(path: str, control: ChangeControl = CLOSED, *restricted: Area) -> Method:
    """A method with the conditions of its path."""
    restrictions = {area: Restriction.of("K", "v") for area in restricted}
    bare = Method(serve=served, parse=bytes, serialize=bytes)
    return GrpcAccess(restrictions, control).guarded({path: bare})[path]


def test_a_method_that_reads_has_no_condition() -> None:
    found = method(INFER)
    assert found.guard is None
    assert found.serve is served


def test_the_restriction_of_an_area_comes_first() -> None:
    guard = method(LOAD, CLOSED, Area.MODEL_REPOSITORY).guard
    assert guard is not None
    with pytest.raises(RpcError) as caught:
        guard(Head(REMOTE))
    assert caught.value.status is StatusCode.UNAVAILABLE
    key = [("triton-grpc-protocol-k", "v")]
    with pytest.raises(RpcError) as caught:
        guard(Head(REMOTE, "", key))
    assert caught.value.status is StatusCode.PERMISSION_DENIED
    guard(Head(LOCAL, "", key))


async def test_settings_decide_whether_a_message_changes_the_server() -> None:
    found = method(LOG)
    assert found.guard is None
    reading, changing = pb.LogSettingsRequest(), pb.LogSettingsRequest()
    changing.settings["log_info"].bool_param = False
    assert await found.serve(reading, Head(REMOTE)) is reading  # type: ignore[arg-type]
    assert await found.serve(changing, Head(LOCAL)) is changing  # type: ignore[arg-type]
    with pytest.raises(RpcError, match="changing log settings is answered to this machine only"):
        await found.serve(changing, Head(REMOTE))  # type: ignore[arg-type]


class CertifiedHead(Head):
    """The head of an RPC by a client with a certificate."""

    @property
    def certificate(self) -> str:
        return "client"


def test_a_repeated_head_has_its_caller_until_that_ends() -> None:
    condition = GrpcKeys(Credentials(), MAY_READ[Area.INFERENCE])
    caller = Caller(roles=frozenset({Role.INFER}))
    head, certified = Head(REMOTE), CertifiedHead(REMOTE)
    head.caller = certified.caller = caller
    condition(head)
    assert head.caller is caller
    with pytest.raises(RpcError, match="is missing"):
        condition(certified)
    caller.valid = False
    with pytest.raises(RpcError, match="is missing"):
        condition(head)
