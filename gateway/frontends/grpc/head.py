"""Large messages that are refused by their head, before their inputs are parsed."""

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError, Refusal
from gateway.frontends.grpc.parameters import wants_cancel
from gateway.frontends.grpc.protobuf_wire import Message, parse_head
from gateway.frontends.grpc.recorded_streams import resumes
from gateway.frontends.grpc.request import DecodedRequest, address
from gateway.policy.caller import Caller


def refused_head(
    dataplane: DataPlane, data: bytes, caller: Caller | None, *, streams: bool
) -> Message | None:
    """A message without inputs, and its refusal, if a limit of its tenant will refuse it.

    None for others, and for messages that cost nothing, or that their method refuses. Raises
    DecodeError for bytes that are not a message.
    """
    head = parse_head(data)
    if head is None or wants_cancel(head) or resumes(head):
        return None
    address(dataplane, head, caller)
    try:
        model = dataplane.model(head.model_name, head.model_version, caller)
        if streams or not model.decoupled:
            dataplane.check_head(caller, model)
    except Refusal as error:
        return head, DecodedRequest(error.again())
    except InferenceError:
        return None  # there is no such model
    return None
