"""Lines of the audit log for changes over gRPC."""

from collections.abc import Mapping
from typing import Any

from gateway.errors import InferenceError
from gateway.frontends.grpc.rpc import Guard, RpcCall, RpcHead, Serve, translated
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.models.model_folder import VERSIONS
from gateway.policy.areas import Area
from gateway.policy.audit import ABORTED, OK, AuditedChange, AuditLog, action_of
from gateway.policy.caller import address_of

MEMBERS = {"model_name": "model", "name": "region", "repository_name": "repository"}
"""The object of a change, by the fields of messages that name one."""


class GrpcAudit:
    """Adds a line for each RPC of a method that changes the server."""

    def __init__(self, log: AuditLog, area: Area, path: str) -> None:
        self._log = log
        self._area = area
        self._path = path
        self._action = action_of(path)

    def guarding(self, guard: Guard) -> Guard:
        """The condition of the method, with a line for each RPC that it refuses."""

        def audited_guard(rpc: RpcHead) -> None:
            try:
                guard(rpc)
            except RpcError as error:
                change, result = self._change(rpc, {}), error.status.name
                self._log.add(change, result, error.details, refused=True)
                raise

        return audited_guard

    def serving(self, serve: Serve) -> Serve:
        """The method, with a line for each answer."""

        async def audited_serve(message: Any, call: RpcCall) -> Any:
            result, text = ABORTED, ""
            try:
                answer = await serve(message, call)
                result = OK
            except (InferenceError, RpcError) as error:
                found = translated(error)
                result, text = found.status.name, found.details
                raise
            except Exception:
                result = StatusCode.INTERNAL.name
                raise
            finally:
                self._log.add(self._change(call, _about(message)), result, text)
            return answer

        return audited_serve

    def _change(self, rpc: RpcHead, about: Mapping[str, Any]) -> AuditedChange:
        return AuditedChange(
            area=self._area,
            action=self._action,
            by="client",
            about=about,
            wire="grpc",
            route=self._path,
            address=address_of(rpc.peer),
            caller=rpc.caller,
        )


def _about(message: Any) -> Mapping[str, Any]:
    """The object of a message: what it names, its settings, the names of its parameters."""
    about: dict[str, Any] = {}
    for field, member in MEMBERS.items():
        if name := getattr(message, field, ""):
            about[member] = name
    if action := getattr(message, "action", ""):
        about["action"] = f"rollout-{action}"
    if settings := getattr(message, "settings", None):
        about["settings"] = {name: _value(each) for name, each in settings.items()}
    if parameters := getattr(message, "parameters", None):
        about["parameters"] = list(parameters)
        if VERSIONS in parameters:
            about[VERSIONS] = parameters[VERSIONS].string_param
    return about


def _value(setting: Any) -> Any:
    """The value of a log setting, or the values of a trace setting."""
    if hasattr(setting, "value"):
        return list(setting.value)
    kind = setting.WhichOneof("parameter_choice")
    return None if kind is None else getattr(setting, kind)
