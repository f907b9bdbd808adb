"""The RPCs about logs and traces: LogSettings, TraceSetting (protocol 13)."""

from typing import Any

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.rpc import Call
from gateway.observability.log import (
    BOOLEANS,
    FORMAT,
    VERBOSE,
    read_log_settings,
    show_log_settings,
)
from gateway.observability.tracer import read_trace_settings, show_trace_settings
from gateway.protos import grpc_service_pb2 as pb

KINDS = {
    **dict.fromkeys(BOOLEANS, ("bool_param", "boolean")),
    VERBOSE: ("uint32_param", "int32"),
    FORMAT: ("string_param", "string"),
}
"""Which variant holds a log setting, and what Triton calls it."""

VARIANTS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class SettingsServicer:
    """The part of GRPCInferenceService that knows settings; raises InferenceError."""

    _dataplane: DataPlane

    async def LogSettings(
        self, request: pb.LogSettingsRequest, call: Call
    ) -> pb.LogSettingsResponse:
        log = self._dataplane.log
        wanted = {name: _log_value(name, value) for name, value in request.settings.items()}
        log.change(read_log_settings(wanted, _refused_format))
        response = pb.LogSettingsResponse()
        for name, value in show_log_settings(log.settings).items():
            setattr(response.settings[name], VARIANTS[type(value)], value)
        return response

    async def TraceSetting(
        self, request: pb.TraceSettingRequest, call: Call
    ) -> pb.TraceSettingResponse:
        model = request.model_name
        if model:
            model = self._dataplane.model(model).name
        wanted = {name: list(each.value) or None for name, each in request.settings.items()}
        tracer = self._dataplane.tracer
        if wanted:
            tracer.update(model, read_trace_settings(wanted))
        response = pb.TraceSettingResponse()
        for name, found in show_trace_settings(tracer.settings(model)).items():
            response.settings[name].value.extend([found] if isinstance(found, str) else found)
        return response


def _log_value(name: str, value: Any) -> Any:
    if name not in KINDS:
        return value
    variant, kind = KINDS[name]
    if value.WhichOneof("parameter_choice") != variant:
        raise InferenceError(Code.INVALID_ARG, f"expect {kind} for '{name}'")
    return getattr(value, variant)


def _refused_format(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"invalid argument for log_format, got: {text}")
