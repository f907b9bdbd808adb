"""sluice.RolloutService: rollouts over gRPC."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, exiting
from gateway.frontends.grpc.rpc import RpcCall
from gateway.policy.caller import address_of
from gateway.protos import rollout_pb2 as pb
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.events import RolloutEvent, RolloutEventKind
from gateway.rollouts.requests import change_rollout

FIELDS: Mapping[RolloutEventKind, str] = {
    RolloutEventKind.RESET: "reset",
    RolloutEventKind.STATE: "transition",
    RolloutEventKind.STEP: "transition",
    RolloutEventKind.BREACH: "transition",
    RolloutEventKind.EVIDENCE: "rollout",
    RolloutEventKind.LIVE: "version",
}
"""The fields with the data of events."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


class RolloutServicer:
    """Methods of RolloutService; each raises InferenceError or RpcError."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._rollouts = dataplane.rollouts

    async def List(self, request: pb.ListRolloutsRequest, call: RpcCall) -> pb.ListRolloutsResponse:
        return _message({"rollouts": self._rollouts.describe_all()}, pb.ListRolloutsResponse())

    async def Get(self, request: pb.GetRolloutRequest, call: RpcCall) -> pb.GetRolloutResponse:
        found: dict[str, Any] = {"rollout": self._rollouts.describe(request.model_name)}
        if request.history:
            found["history"] = self._rollouts.history(request.model_name)
        return _message(found, pb.GetRolloutResponse())

    async def Change(
        self, request: pb.ChangeRolloutRequest, call: RpcCall
    ) -> pb.ChangeRolloutResponse:
        if request.action not in [*RolloutAction]:
            raise InferenceError(
                Code.INVALID_ARG,
                f"action is '{request.action}', expected one of {', '.join(RolloutAction)}",
            )
        members = _with_integers(MessageToDict(request.members))
        by = f"api:{address_of(call.peer)}"
        found = await change_rollout(
            self._rollouts, request.model_name, RolloutAction(request.action), members, by
        )
        return _message({"rollout": found}, pb.ChangeRolloutResponse())

    async def Watch(self, request: pb.WatchRolloutsRequest, call: RpcCall) -> None:
        """Send events until the client disconnects; UNAVAILABLE at shutdown."""
        async with aclosing(
            self._rollouts.events.read(request.last_event_id, call.caller)
        ) as events:
            async for event in events:
                await call.send([_event(event).SerializeToString()])
        raise exiting()


def _with_integers(value: Any) -> Any:
    """The value with integers for whole numbers: a Struct has none."""
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def _event(event: RolloutEvent) -> pb.RolloutEvent:
    members = {"id": event.id, "kind": event.kind, FIELDS[event.kind]: event.data}
    return _message(members, pb.RolloutEvent())


def _message(members: Mapping[str, Any], message: AnyMessage) -> AnyMessage:
    """The message with the members of JSON; a number that JSON lacks is unset."""
    return ParseDict(msgspec.json.decode(msgspec.json.encode(members)), message)
